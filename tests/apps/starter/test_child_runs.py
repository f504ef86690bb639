import subprocess
import sys
import time

import pytest
from helpers.processes import is_running

from vitkit.apps.starter.child_runs import last_error, run_to_end, time_steps
from vitkit.errors import TrainingError

PARENT = """
import subprocess, sys
from vitkit.apps.starter.child_runs import _end_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=_end_with_parent, stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_tool_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_last_error_of_an_output_is_its_first_line():
    output = (
        "step 1\nerror: a photo is lost, another takes its place\nstep 2\nerror: weights do not fit.\n  missing: a\n"
    )
    assert last_error(output) == "weights do not fit."
    assert last_error("step 1\nKilled\n") == "Killed" and last_error("") == "failed"


def test_error_of_a_tool_is_repeated_without_its_prefix_also_beside_a_clone_that_does_not_hide_vitkit(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vitkit").mkdir()
    with pytest.raises(TrainingError, match=r"^no config file 'none\.py'.*\(.*run\.txt\)$"):
        run_to_end(["vitkit", "train", "none.py"], tmp_path / "run")


def test_time_that_is_too_short_for_a_step_is_an_error_that_says_so(tmp_path):
    command = ["vitkit", "train", "quickstart/vit"]
    with pytest.raises(
        TrainingError, match=r"^0 steps in 1 s are too few to time them \(.*timing\.txt\)\. Give more time"
    ):
        time_steps(command, tmp_path / "timing", epoch_minutes=0.6 / 60)
