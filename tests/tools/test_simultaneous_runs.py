"""Runs that are started together get separate folders, or end with an error that names the other one."""

import re
import signal
from functools import partial
from pathlib import Path

import pytest
from helpers.real_runs import CONFIG, LAST_STEP, finish, hold_after, log_of, reached, start, wait_for_step

from vitkit.weights import read_checkpoint


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(CONFIG)


def messages() -> list[str]:
    return re.findall(r"error: .*", Path("output.txt").read_text())


def test_runs_started_in_a_loop_get_separate_folders():
    runs = [start("tiny.py", "train.epochs=1") for _ in range(3)]
    assert [finish(run) for run in runs] == [[0]] * 3
    folders = sorted(path.name for path in Path("runs").iterdir())
    assert folders == ["tiny", "tiny-2", "tiny-3"]
    logs = [log_of(f"runs/{name}") for name in folders]
    assert logs[0] and logs[0] == logs[1] == logs[2]


def test_only_one_of_two_runs_in_the_same_folder_trains(tmp_path):
    runs = [start("tiny.py", "--run-dir", "run", "train.epochs=1") for _ in range(2)]
    assert sorted(finish(run)[0] for run in runs) == [0, 1]
    (message,) = messages()
    assert re.search(r"--run-dir run: (in use by process \d+ on \S+ since|already contains a run)", message)
    assert log_of("run")


def test_only_one_of_two_processes_resuming_a_run_trains():
    first = start("tiny.py", "--run-dir", "run", prepare=partial(hold_after, 2))
    wait_for_step("run", 2, first)
    assert finish(start("--resume", "run")) == [1]
    assert f"--resume run: in use by process {first[0].pid} on " in messages()[0]
    first[0].kill()
    assert finish(first) == [-signal.SIGKILL] and reached("run") == 2
    runs = [start("--resume", "run") for _ in range(2)]
    statuses = [finish(run)[0] for run in runs]
    # On a busy machine, the second may start after the first has ended, and find the run complete.
    assert statuses.count(0) == 1 or len(messages()) == 1
    assert read_checkpoint("run/last.pth")["progress"]["step"] == LAST_STEP
    assert log_of("run")


def test_only_one_of_two_torchrun_launches_in_the_same_folder_trains():
    """The launches differ as two of `torchrun --standalone` do, by an id."""
    launches = [start("tiny.py", "--run-dir", "run", ranks=2, TORCHELASTIC_RUN_ID=name) for name in ("a", "b")]
    assert sorted(finish(launch) for launch in launches) == [[0, 0], [1, 1]], Path("output.txt").read_text()[-4000:]
    assert re.search(r"--run-dir run: (in use by process \d+ on \S+ since|already contains a run)", messages()[0])
    assert read_checkpoint("run/last.pth")["progress"]["step"] == LAST_STEP / 2 and log_of("run")
