"""Runs that are killed or stopped at any moment, and resumed, end with the same weights as an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.forked_python import forked_python
from helpers.ports import reserve_port
from helpers.processes import PROCESS_TIMEOUT
from helpers.real_runs import (
    CONFIG,
    LAST_STEP,
    assert_same,
    die_in,
    finish,
    hold_after,
    reached,
    share_batch,
    start,
    wait_for_step,
)

from vitkit.engine import validation
from vitkit.engine.hooks import Interrupted
from vitkit.weights import read_checkpoint

train = pytest.importorskip("vitkit.tools.train", reason="vitkit is not installed (pip install -e .)")

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with uninterrupted runs: `whole1` of one rank, `whole2` of two."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.py").write_text(CONFIG)
    before = Path.cwd()
    os.chdir(folder)
    for ranks in (1, 2):
        assert finish(start("tiny.py", "--run-dir", f"whole{ranks}", *share_batch(ranks), ranks=ranks)) == [0] * ranks
    os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("ranks", "seed"), [(1, 0), (2, 2), pytest.param(1, 1, marks=SLOW), pytest.param(2, 3, marks=SLOW)]
)
def test_run_killed_at_random_moments_equals_an_uninterrupted_one(ranks, seed):
    draw = random.Random(seed)
    run = f"killed{ranks}-{seed}"
    argv = ["tiny.py", "--run-dir", run, *share_batch(ranks)]
    for step in sorted(draw.sample(range(1, LAST_STEP), 3)):
        processes = start(*argv, ranks=ranks)
        wait_for_step(run, step, processes)
        assert Path(run, "last.pth").is_file()
        time.sleep(draw.random() * 0.1)
        for process in processes:
            process.kill()
        assert set(finish(processes)) <= {-signal.SIGKILL, 0, 1}
        argv = ["--resume", run]
    assert finish(start("--resume", run, ranks=ranks)) == [0] * ranks
    assert_same(run, f"whole{ranks}")


@pytest.mark.parametrize("dies_in", [("save", 5), ("rename", 8), ("link", 6)])
def test_run_killed_while_saving_equals_an_uninterrupted_one(dies_in):
    run = f"{dies_in[0]}{dies_in[1]}"
    assert finish(start("tiny.py", "--run-dir", run, prepare=partial(die_in, *dies_in))) == [-signal.SIGKILL]
    assert list(Path(run).glob("*.tmp")) or dies_in[0] == "link"
    assert finish(start("--resume", run)) == [0]
    assert_same(run, "whole1")
    assert {path.name for path in Path(run).glob("step_*")} == {"step_00000011.pth", "step_00000012.pth"}


needs_newer_torch = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards no model among CPU processes"
)
# Saving takes most of the time of such a run, here within the second epoch and at the end of each.
SHARDED = ["train.strategy=fsdp", "train.sharded_checkpoints=true", "train.save_every_steps=6", *share_batch(2)]


@pytest.fixture(scope="module")
def sharded(folder) -> str:
    """Return an uninterrupted run of two ranks that write their shards."""
    before = Path.cwd()
    os.chdir(folder)
    assert finish(start("tiny.py", "--run-dir", "sharded", *SHARDED, ranks=2)) == [0, 0]
    os.chdir(before)
    return "sharded"


def assert_same_shards(run: str, whole: str) -> None:
    assert_same(run, whole)
    named = {read_checkpoint(path, with_shards=False)["shards"]["folder"] for path in Path(run).glob("*.pth")}
    assert {path.name for path in Path(run).glob("*.shards")} == named


@needs_newer_torch
@pytest.mark.parametrize("dies_in", [("shards", 5), ("folder", 6)])
def test_run_killed_while_saving_shards_equals_an_uninterrupted_one(sharded, dies_in):
    run = f"sharded_{dies_in[0]}"
    dying = start("tiny.py", "--run-dir", run, *SHARDED, ranks=2, prepare=partial(die_in, *dies_in))
    assert -signal.SIGKILL in finish(dying)
    assert list(Path(run).glob("*.shards.tmp"))
    assert finish(start("--resume", run, ranks=2)) == [0, 0]
    assert_same_shards(run, sharded)


@needs_newer_torch
@pytest.mark.parametrize(("seed", "kills"), [(0, 1), pytest.param(1, 20, marks=SLOW), pytest.param(2, 20, marks=SLOW)])
def test_ranks_killed_at_any_moment_of_saving_lose_nothing(sharded, seed, kills):
    """One rank or both are killed, at once or one after the other; runs are short, so that several can be killed."""
    draw, done, number = random.Random(seed), 0, 0
    while done < kills:
        number, run = number + 1, f"shards{seed}-{number}"
        argv = ["tiny.py", "--run-dir", run, *SHARDED]
        for _ in range(min(5, kills - done)):
            processes = start(*argv, ranks=2)
            wait_for_step(run, min(reached(run) + draw.randint(1, 3), LAST_STEP - 1), processes)
            wait_for_save(run, processes)
            time.sleep(draw.random() * 0.02)
            first, second = draw.sample(processes, 2)
            first.kill()
            time.sleep(draw.choice([0, 0.01, 0.5]))
            second.kill()
            done += -signal.SIGKILL in finish(processes)
            argv = ["--resume", run]
        assert finish(start("--resume", run, ranks=2)) == [0, 0], Path("output.txt").read_text()[-2000:]
        assert_same_shards(run, sharded)


def wait_for_save(run: str, processes: list) -> None:
    """Wait until shards, or the file that lists them, are being written."""
    deadline = time.monotonic() + 5
    while not list(Path(run).glob("*.tmp")) and all(process.is_alive() for process in processes):
        time.sleep(0.001)
        if time.monotonic() > deadline:
            return


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_signal_ends_the_run_after_its_step_with_a_checkpoint_and_the_resume_command(ranks, number):
    run = f"signaled{ranks}"
    Path("output.txt").unlink(missing_ok=True)
    processes = start(
        "tiny.py",
        "--run-dir",
        run,
        *share_batch(ranks),
        "train.save_every_steps=none",
        "data.num_workers=1",
        "data.start_workers=fork",
        ranks=ranks,
        prepare=partial(hold_after, 6),
    )
    wait_for_step(run, 6, processes)
    os.kill(processes[-1].pid, number)  # one rank only: all of them stop
    statuses = finish(processes)
    assert statuses == [143 if ranks == 2 else 130] * ranks
    output = Path("output.txt").read_text()
    assert f"{number.name}: saved. Resume with:" in output and f"--resume {run} --device cpu" in output
    assert read_checkpoint(Path(run, "last.pth"))["progress"]["step"] == 7
    assert finish(start("--resume", run, "train.save_every_steps=1", ranks=ranks)) == [0] * ranks
    assert_same(run, f"whole{ranks}")


def test_signal_to_a_whole_process_group_saves_the_run():
    """As with Slurm, the workers also get the signal."""
    Path("output.txt").unlink(missing_ok=True)
    options = ["data.num_workers=2", "data.start_workers=fork", "train.epochs=200", "schedule.end_factor=1.0"]
    processes = start("tiny.py", "--run-dir", "group", *options, prepare=os.setsid)
    wait_for_step("group", 3, processes)
    os.killpg(processes[0].pid, signal.SIGTERM)
    assert finish(processes) == [143]
    output = Path("output.txt").read_text()
    assert "Resume with:" in output and "--resume group --device cpu" in output and "Traceback" not in output
    assert read_checkpoint("group/last.pth")["progress"]["step"] >= 3


def test_stop_during_evaluation_saves_at_once_and_evaluates_after_resuming(monkeypatch):
    def interrupted(*args, **options):
        torch.rand(1)  # evaluation may draw random numbers
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(validation, "check_validation", lambda *args: None)  # before it, nothing could be saved
        patch.setattr(validation, "evaluate", interrupted)
        with pytest.raises(Interrupted) as interrupted:
            train.main(["tiny.py", "--run-dir", "evaluating", "--device", "cpu"])
    assert interrupted.value.code == 143
    progress = read_checkpoint("evaluating/last.pth")["progress"]
    assert (progress["epoch"], progress["batch"], progress["num_batches"]) == (0, 8, 8)
    assert finish(start("--resume", "evaluating")) == [0]
    assert_same("evaluating", "whole1")


BREAKING = """
import os
import signal
from pathlib import Path

from tiny import config as tiny
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.registry import DATASETS


@DATASETS.register
class Breaking(ShapesDetection):
    def __getitem__(self, item):
        run = Path(os.environ["BREAKING"])
        if os.environ["RANK"] == "1" and (run / "step_00000006.pth").exists() and not (run / "broke").exists():
            (run / "broke").touch()
            if run.name.startswith("restarted"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a cosmic ray")
        return super().__getitem__(item)


def config():
    cfg = tiny()
    cfg["data"]["train"]["type"] = "Breaking"
    return cfg
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Iterator[Path]:
    with forked_python(tmp_path_factory.mktemp("python")) as command:
        yield command


def torchrun_process(
    run: str, *options: str, python: Path, ranks: str | None = None, **variables: str
) -> subprocess.Popen:
    """Start torchrun with a run whose rank 1 fails once.

    Args:
        python: the interpreter of torchrun and, unless `ranks` is another, of the ranks.
        variables: environment variables.
    """
    Path("breaking.py").write_text(BREAKING)
    command = [str(python), "-m", "torch.distributed.run", *options, str(ROOT / "tools" / "train.py"), "breaking.py"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path.cwd()}", "BREAKING": run}
    environment["PYTHON_EXEC"] = ranks or str(python)  # torchrun starts ranks with it
    return subprocess.Popen(
        [*command, *share_batch(2), "--run-dir", run, "--device", "cpu"],
        env={**os.environ, **environment, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(run: str, *options: str, **interpreters) -> tuple[int, str]:
    """Run one agent with two processes; return its exit status and all output."""
    process = torchrun_process(run, "--standalone", "--nproc-per-node", "2", *options, **interpreters)
    said = process.communicate(timeout=PROCESS_TIMEOUT)[1]
    return process.returncode, said


@pytest.mark.parametrize("ranks", [pytest.param(None, id="forked"), pytest.param(sys.executable, id="new")])
def test_a_rank_that_fails_ends_the_other_and_its_error_is_shown(python, ranks):
    run = "broken" if ranks is None else "broken_new"
    status, said = torchrun(run, python=python, ranks=ranks)  # without waiting for an hour
    assert status == 1
    assert "KeyError: 'a cosmic ray'" in said
    assert said.count("Traceback") <= 3  # of the cause, of torchrun's quotation, and of torchrun
    assert read_checkpoint(f"{run}/last.pth")["progress"]["step"] >= 6


def test_run_resumes_automatically_under_torchrun_with_restarts(python):
    status, said = torchrun("restarted", "--max-restarts", "1", python=python)
    assert status == 0, said[-3000:]
    assert Path("restarted", "broke").exists()
    assert_same("restarted", "whole2")


@pytest.mark.parametrize("slurm", [False, pytest.param(True, marks=SLOW)])
def test_run_on_two_machines_resumes_automatically(slurm, python):
    """Two agents meet as on two machines. Only the one whose process fails counts a restart."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{reserve_port()}"]
    meeting += ["--rdzv-id", "17"] if slurm else []
    # What srun sets for the task on each machine.
    jobs = [dict(SLURM_JOB_ID="17", SLURM_STEP_ID="0", SLURM_PROCID=task) if slurm else {} for task in "01"]
    # On a busy machine, an agent may first see that the other one has left, and use up a restart.
    options = ["--nnodes", "2", "--nproc-per-node", "1", *meeting, "--local-addr", "127.0.0.1", "--max-restarts", "3"]
    run = "restarted_slurm" if slurm else "restarted2"
    agents = [torchrun_process(run, *options, python=python, **job) for job in jobs]
    try:
        said = [process.communicate(timeout=PROCESS_TIMEOUT)[1] for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], "\n".join(text[-3000:] for text in said)
    assert Path(run, "broke").exists()
    assert_same(run, "whole2")
