"""Broken input of every kind ends in a correct result or in one of vitkit's errors: no traceback, hang or crash.

Each case changes valid files at random, from a seed, and runs in a separate process. A few hundred run here; many run
by `python -m fuzz.run --cases 10000 --seed 7` in tests/, which prints a table. The files of cases that failed are added
to tests/corpus/FORMAT/ with the fix.
"""

import os
from pathlib import Path

import pytest
from fuzz.isolation import Outcome, run_isolated
from fuzz.surfaces import CASE_FOLDERS, CORPUS, FORMATS, check_folder, run_seeds, seeds_of
from fuzz.world import make_world

CASES = 620


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


@pytest.mark.parametrize("name", FORMATS)
def test_broken_input_is_read_or_a_clean_error(name, world, tmp_path):
    if name == "tokenizers":
        pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    counts, failures = run_seeds(FORMATS[name], seeds_of(FORMATS[name], CASES), world, tmp_path)
    assert not failures, f"{dict(counts)}\n" + "\n\n".join(failures[:10])
    assert counts["accepted"] and counts["error"], f"{dict(counts)}: cases of one kind show little"


@pytest.mark.parametrize("folder", CASE_FOLDERS, ids=lambda folder: folder.relative_to(CORPUS).as_posix())
def test_inputs_that_failed_before_are_read_or_clean_errors(folder, world, tmp_path):
    outcome = check_folder(FORMATS[folder.parent.name], folder, world, tmp_path)
    assert outcome.ended_well, outcome


def test_outcomes_are_distinguished(tmp_path):
    def ends(case) -> Outcome:
        return run_isolated(case, tmp_path, ValueError)

    def allocate(_):
        return b"x" * (8 << 30)

    def give_up(_):
        raise ValueError("annotation 3 is wrong")

    def give_up_in_two_lines(_):
        raise ValueError("annotation 'a\nb' is wrong")

    def say_nothing(_):
        raise ValueError

    assert ends(lambda _: None) == Outcome("accepted", "")
    assert ends(give_up) == Outcome("error", "error: annotation 3 is wrong")
    assert ends(say_nothing).kind == ends(give_up_in_two_lines).kind == "traceback"
    assert ends(lambda _: {}["key"]).message.startswith("KeyError: 'key'")
    assert ends(allocate).kind == "memory"
    assert ends(lambda _: os.kill(os.getpid(), 11)) == Outcome("crash", "SIGSEGV")


def test_hanging_processes_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.isolation.SECONDS", 1)

    def sleep(_):
        import time

        time.sleep(60)

    def loop(_):
        while True:
            pass

    assert run_isolated(sleep, tmp_path, ValueError).kind == "hang"
    assert run_isolated(loop, tmp_path, ValueError).kind == "hang"
