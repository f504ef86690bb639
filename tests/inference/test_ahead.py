"""Threads that work while the model runs."""

import threading

import pytest

from vitkit.inference.ahead import map_ahead


def test_results_come_in_order_though_threads_end_in_another():
    second_is_done = threading.Event()

    def double(number: int) -> int:
        if number == 0:
            assert second_is_done.wait(10)
        if number == 1:
            second_is_done.set()
        return 2 * number

    assert list(map_ahead(double, range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert list(map_ahead(double, [])) == []


def test_items_are_taken_only_as_results_are_used():
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    results = map_ahead(str, items(), workers=2, ahead=3)
    for used in range(1, 18):
        assert next(results) == str(used - 1) and len(taken) == used + 2
    assert list(results) == ["17", "18", "19"]


def test_an_error_comes_when_its_item_is_due_and_no_thread_is_left():
    results = map_ahead(lambda number: 6 // number, [3, 2, 0, 1], ahead=4)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
