"""Broken input of every kind ends in a correct result or in one of vitkit's errors: no traceback, hang or crash.

Each case changes valid files at random, from a seed, and runs in a process that may end with it. A few hundred run
here; many run by `python -m fuzz.run --cases 10000 --seed 7` in tests/, which prints a table. The files of cases that
failed are added to tests/corpus/FORMAT/ with the fix.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fuzz.isolation import Outcome, run_isolated
from fuzz.surfaces import CASE_FOLDERS, CORPUS, FORMATS, check_folders, run_seeds, seeds_of
from fuzz.world import make_world

CASES = 620


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


@pytest.mark.parametrize("name", FORMATS)
def test_broken_input_is_read_or_a_clean_error(name, world, tmp_path):
    if name == "tokenizers":
        pytest.importorskip("tokenizers", reason="needs pip install 'vitkit[text]'")
    counts, failures = run_seeds(FORMATS[name], seeds_of(FORMATS[name], CASES), world, tmp_path)
    assert not failures, f"{dict(counts)}\n" + "\n\n".join(failures[:10])
    assert counts["accepted"] and counts["error"], f"{dict(counts)}: cases of one kind show little"


@pytest.fixture(scope="module")
def outcomes(world, tmp_path_factory) -> Callable[[str], dict[Path, Outcome]]:
    """Return a function that checks all kept cases of a format, once."""

    @cache
    def outcomes_of(name):
        folders = [folder for folder in CASE_FOLDERS if folder.parent.name == name]
        return dict(zip(folders, check_folders(FORMATS[name], folders, world, tmp_path_factory.mktemp("kept"))))

    return outcomes_of


@pytest.mark.parametrize("folder", CASE_FOLDERS, ids=lambda folder: folder.relative_to(CORPUS).as_posix())
def test_inputs_that_failed_before_are_read_or_clean_errors(folder, outcomes):
    outcome = outcomes(folder.parent.name)[folder]
    assert outcome.ended_well, outcome


def run_all(cases, folder) -> list[Outcome]:
    folders = [folder / str(number) for number in range(len(cases))]
    for case_folder in folders:
        case_folder.mkdir()
    return run_isolated(cases, folders, ValueError)


def test_outcomes_are_distinguished_and_the_next_case_follows(tmp_path):
    def allocate(_):
        return b"x" * (8 << 30)

    def give_up(_):
        raise ValueError("annotation 3 is wrong")

    def give_up_in_two_lines(_):
        raise ValueError("annotation 'a\nb' is wrong")

    def say_nothing(_):
        raise ValueError

    def accept(_):
        pass

    def fail(_):
        {}["key"]

    def crash(_):
        os.kill(os.getpid(), 11)

    cases = [accept, give_up, say_nothing, give_up_in_two_lines, fail, allocate, crash, crash, give_up, accept]
    ends = run_all(cases, tmp_path)
    assert ends[0] == ends[9] == Outcome("accepted", "")
    assert ends[1] == ends[8] == Outcome("error", "error: annotation 3 is wrong")
    assert ends[2].kind == ends[3].kind == "traceback"
    assert ends[4].message.startswith("KeyError: 'key'")
    assert ends[5].kind == "memory"
    assert ends[6] == ends[7] == Outcome("crash", "SIGSEGV")


def test_hanging_processes_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzz.isolation.SECONDS", 0.5)

    def sleep(_):
        import time

        time.sleep(60)

    def loop(_):
        while True:
            pass

    assert [outcome.kind for outcome in run_all([sleep, loop], tmp_path)] == ["hang", "hang"]
