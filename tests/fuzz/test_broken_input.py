"""Broken input of every kind ends in a correct result or in one of vitkit's errors: no traceback, hang or crash.

Each case changes valid files at random, from a seed, and runs in a separate process. A few hundred run by default;
`pytest -m slow tests/fuzz` runs VITKIT_FUZZ_CASES (10,000) from VITKIT_FUZZ_SEED (1000) on, and prints a table. Cases
that fail are copied to VITKIT_FUZZ_KEEP; with the fix, they are added to tests/corpus/FORMAT/.
"""

import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fuzz import annotations, checkpoints, configs, features, images, results, texts, transformers_folders, videos
from fuzz.formats import Format
from fuzz.isolation import Outcome, run_isolated
from fuzz.world import make_world

FORMATS = {
    kind.name: kind
    for module in (annotations, images, checkpoints, transformers_folders, features, texts, results, configs, videos)
    for kind in module.FORMATS
}
CORPUS = Path(__file__).resolve().parents[1] / "corpus"
CASE_FOLDERS = sorted(path for path in CORPUS.glob("*/*") if path.is_dir() and path.parent.name in FORMATS)
CASES, SLOW_CASES = 400, int(os.environ.get("VITKIT_FUZZ_CASES", 10_000))
FIRST_SLOW_SEED = int(os.environ.get("VITKIT_FUZZ_SEED", 1000))
_totals: dict[str, Counter[str]] = {}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("fuzz") / "world")


def seeds_of(kind: Format, cases: int, first: int = 0) -> range:
    shares = sum(other.share for other in FORMATS.values())
    return range(first, first + -(-cases * kind.share // shares))


def run_seeds(kind: Format, seeds: range, world: Path, folder: Path) -> tuple[Counter[str], list[str]]:
    """Return the number of cases by outcome, and descriptions of those that failed."""
    kind.warm_up()
    counts: Counter[str] = Counter()
    failures = []
    case_folder = folder / "case"
    for seed in seeds:
        case_folder.mkdir()
        outcome = run_isolated(partial(write_and_check, kind, seed, world), case_folder, kind.error)
        counts[outcome.kind] += 1
        if not outcome.ended_well:
            failures.append(f"{kind.name}, seed {seed}: {outcome.kind}: {outcome.message}")
            if keep := os.environ.get("VITKIT_FUZZ_KEEP"):
                shutil.rmtree(case_folder / "world", ignore_errors=True)
                kept = Path(keep) / kind.name / str(seed)
                shutil.copytree(case_folder, kept, dirs_exist_ok=True, symlinks=True)
                (kept / "outcome.txt").write_text(failures[-1])
        shutil.rmtree(case_folder)
    return counts, failures


def write_and_check(kind: Format, seed: int, world: Path, folder: Path) -> None:
    kind.write(random.Random(f"{kind.name} {seed}"), folder, world)
    kind.check(folder, world)


@pytest.mark.parametrize("name", FORMATS)
def test_broken_input_is_read_or_a_clean_error(name, world, tmp_path):
    counts, failures = run_seeds(FORMATS[name], seeds_of(FORMATS[name], CASES), world, tmp_path)
    assert not failures, f"{dict(counts)}\n" + "\n\n".join(failures[:10])
    assert counts["accepted"] and counts["error"], f"{dict(counts)}: cases of one kind show little"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_broken_inputs_are_read_or_clean_errors(name, world, tmp_path):
    kind = FORMATS[name]
    _totals[name], failures = run_seeds(kind, seeds_of(kind, SLOW_CASES, FIRST_SLOW_SEED), world, tmp_path)
    columns = ("accepted", "error", "failure", "hang", "crash")
    lines = [f"{'':<14}" + "".join(f"{column:>10}" for column in columns)]
    lines += [
        f"{name:<14}" + "".join(f"{counts[column]:>10}" for column in columns) for name, counts in _totals.items()
    ]
    print("\n" + "\n".join(lines))
    assert not failures, "\n\n".join(failures[:40])


@pytest.mark.parametrize("folder", CASE_FOLDERS, ids=lambda folder: folder.relative_to(CORPUS).as_posix())
def test_inputs_that_failed_before_are_read_or_clean_errors(folder, world, tmp_path):
    kind = FORMATS[folder.parent.name]
    kind.warm_up()
    case_folder = Path(shutil.copytree(folder, tmp_path / "case"))
    outcome = run_isolated(lambda case: kind.check(case, world), case_folder, kind.error)
    assert outcome.ended_well, outcome


def test_outcomes_are_distinguished(tmp_path):
    def ends(case) -> Outcome:
        return run_isolated(case, tmp_path, ValueError)

    def allocate(_):
        return b"x" * (8 << 30)

    def give_up(_):
        raise ValueError("annotation 3 is wrong")

    def say_nothing(_):
        raise ValueError

    assert ends(lambda _: None) == Outcome("accepted", "")
    assert ends(give_up) == Outcome("error", "annotation 3 is wrong")
    assert ends(say_nothing).kind == "failure"
    assert ends(lambda _: {}["key"]).message.startswith("KeyError: 'key'")
    assert ends(allocate).message.startswith("MemoryError")
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
