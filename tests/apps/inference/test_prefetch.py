"""Threads that work while the model runs."""

import threading

import pytest

from vitkit.apps.inference.prefetch import map_ahead


def test_results_keep_their_order_whichever_thread_finishes_first():
    second_is_done = threading.Event()

    def double(number: int) -> int:
        if number == 0:
            assert second_is_done.wait(60)
        if number == 1:
            second_is_done.set()
        return 2 * number

    assert list(map_ahead(double, range(7))) == [0, 2, 4, 6, 8, 10, 12]
    assert list(map_ahead(double, [])) == []


def test_items_are_consumed_only_as_results_are_used():
    taken = []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    results = map_ahead(str, items(), workers=2, ahead=3)
    for used in range(1, 18):
        assert next(results) == str(used - 1) and len(taken) == used + 2
    assert list(results) == ["17", "18", "19"]


def test_error_is_raised_at_its_item_and_all_threads_end():
    before = {*threading.enumerate()}  # tests of other files may have left some
    results = map_ahead(lambda number: 6 // number, [3, 2, 0, 1], ahead=4)
    assert [next(results), next(results)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        next(results)
    started = {*threading.enumerate()} - before
    assert not [thread for thread in started if thread.name.startswith("ThreadPoolExecutor")]
