"""What is saved when, what a full disk leaves, which checkpoint is the newest, and what may change in a run."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from test_train import Batches, records, run

from vitkit.checkpoint import link_checkpoint, read_checkpoint, save_checkpoint
from vitkit.engine import checkpoints
from vitkit.engine.checkpoints import BEST_NAME, LAST_NAME, Progress, newest_checkpoint, remove_stale
from vitkit.engine.resuming import launch_of_process, mark_launch, report_changes, restarted_run, resume_command
from vitkit.engine.stopping import Stopped, StopSignals
from vitkit.errors import CheckpointError, ConfigError
from vitkit.logging import LOG_NAME, RunLog


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO, logger="vitkit")


class StopsAt(Batches):
    """Sends a signal to the run when it takes a batch."""

    def __init__(self, epoch, batch, number=signal.SIGTERM):
        super().__init__()
        self.stop, self.number = (epoch, batch), number

    def __iter__(self):
        for position, batch in enumerate(super().__iter__(), start=self.batch):
            if (self.epoch, position) == self.stop:
                os.kill(os.getpid(), self.number)
            yield batch


def test_an_evaluation_that_fails_costs_no_epoch(tmp_path):
    def broken(model):
        torch.rand(1)
        raise ZeroDivisionError("in the evaluator")

    def sound(model):
        return {"bbox/AP": torch.rand(1).item()}

    whole, _ = run(tmp_path / "whole", evaluate=sound)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "parts", evaluate=broken)
    assert read_checkpoint(tmp_path / "parts" / LAST_NAME)["progress"]["batch"] == 8
    resumed, _ = run(tmp_path / "parts", evaluate=sound, resume=tmp_path / "parts" / LAST_NAME)
    assert all(value.equal(resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    assert [r["metrics"] for r in records(tmp_path / "whole", "val")] == [
        r["metrics"] for r in records(tmp_path / "parts", "val")
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", "schedule", "progress", "rng", "meters"])
def test_a_checkpoint_with_a_part_that_is_something_else_is_an_error_that_names_it(tmp_path, name):
    run(tmp_path / "run", epochs=1)
    last = tmp_path / "run" / LAST_NAME
    sound = read_checkpoint(last)
    for junk in (None, 3, "x", [], {}, {"step": None}, {"a": [1]}, [{"torch": 1, "close": 2}]):
        save_checkpoint(last, {**sound, name: junk})
        with pytest.raises(CheckpointError, match=r"last\.pth: "):
            run(tmp_path / "run", epochs=2, resume=last)


def steps_of(folder):
    return sorted(path.name for path in folder.glob("step_*"))


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}, {"precision": "fp16"}, {"accumulate": 2}])
@pytest.mark.parametrize("where", [(0, 0), (1, 4), (3, 7)])
def test_a_run_stopped_within_an_epoch_and_resumed_equals_one_never_stopped(tmp_path, options, where):
    whole, _ = run(tmp_path / "whole", **options)
    with pytest.raises(Stopped) as stopped:
        run(tmp_path / "parts", loader=StopsAt(*where), **options)
    assert stopped.value.code == 143
    resumed, progress = run(tmp_path / "parts", resume=tmp_path / "parts" / LAST_NAME, **options)
    a, b = (read_checkpoint(tmp_path / name / LAST_NAME) for name in ("whole", "parts"))
    assert a["progress"] == b["progress"] == asdict(progress)
    for key in {"model", "ema"} & a.keys():
        assert all(value.equal(b[key][name]) for name, value in a[key].items())
    assert a["scaler"] == b["scaler"] and a["schedule"] == b["schedule"]
    assert all(value.equal(resumed.state_dict()[name]) for name, value in whole.state_dict().items())
    assert all(x["close"].equal(y["close"]) for x, y in zip(a["meters"], b["meters"], strict=True))
    # Of the epoch's last and partial line only the losses' mean starts anew.
    positions = [[(r["step"], r["lr"]) for r in records(tmp_path / name, "train")] for name in ("whole", "parts")]
    assert positions[0] == positions[1]


def test_checkpoints_within_epochs_come_by_steps_and_by_time_and_old_ones_go(tmp_path, monkeypatch):
    seen = []
    save = checkpoints.save_checkpoint
    monkeypatch.setattr(checkpoints, "save_checkpoint", lambda path, state: seen.append(path.name) or save(path, state))
    run(tmp_path / "steps", epochs=1, save_every_steps=3, keep_checkpoints=2)
    assert seen == [f"step_{step:08d}.pth" for step in (0, 3, 6, 8)]
    assert steps_of(tmp_path / "steps") == ["step_00000006.pth", "step_00000008.pth"]
    assert read_checkpoint(tmp_path / "steps" / LAST_NAME)["progress"]["epoch"] == 1
    seen.clear()
    run(tmp_path / "time", epochs=1, save_every_minutes=0.0)
    assert seen == [LAST_NAME] * 10
    seen.clear()
    run(tmp_path / "epochs", epochs=2, save_every_minutes=None)
    assert seen == [LAST_NAME] * 3


def test_the_best_checkpoint_is_a_second_name_that_outlives_the_first(tmp_path):
    metrics = iter([0.5, 0.2])
    run(tmp_path / "run", evaluate=lambda model: {"bbox/AP": next(metrics)}, epochs=2)
    assert read_checkpoint(tmp_path / "run" / BEST_NAME)["progress"]["epoch"] == 1
    assert read_checkpoint(tmp_path / "run" / LAST_NAME)["progress"]["epoch"] == 2


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_checkpoint_from_before_and_training_goes_on(tmp_path, monkeypatch, caplog):
    fsync, calls = os.fsync, []

    def full_at_times(file):
        calls.append(file)
        full_disk() if 4 <= len(calls) <= 5 else fsync(file)

    monkeypatch.setattr(os, "fsync", full_at_times)
    kept = []
    run(tmp_path / "run", epochs=3, evaluate=lambda m: kept.append(read_checkpoint(tmp_path / "run" / LAST_NAME)) or {})
    assert [state["progress"]["epoch"] for state in kept] == [0, 1, 1]  # the second epoch's was not written
    assert (
        "last.pth: not saved (No space left on device). The checkpoint that was there before is intact" in caplog.text
    )
    assert read_checkpoint(tmp_path / "run" / LAST_NAME)["progress"]["epoch"] == 3
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_a_disk_that_stays_full_ends_the_run_with_an_error(tmp_path, monkeypatch):
    run(tmp_path / "run", epochs=1)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"not saved \(No space left on device\)"):
        run(tmp_path / "run", epochs=2, resume=tmp_path / "run" / LAST_NAME)
    assert read_checkpoint(tmp_path / "run" / LAST_NAME)["progress"]["epoch"] == 1


def test_torchs_own_error_of_a_full_disk_is_understood(tmp_path, monkeypatch):
    def save(state, file):
        try:
            full_disk()
        finally:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=r"a\.pth: not saved \(No space left on device\)\. Make room"):
        save_checkpoint(tmp_path / "a.pth", {})


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_really_full(small_disk):
    save_checkpoint(small_disk / LAST_NAME, {"a": torch.zeros(100_000)})
    with pytest.raises(CheckpointError, match=r"not saved \(No space left on device\)\. The checkpoint that was there"):
        save_checkpoint(small_disk / LAST_NAME, {"a": torch.zeros(200_000)})
    assert len(read_checkpoint(small_disk / LAST_NAME)["a"]) == 100_000
    assert [path.name for path in small_disk.iterdir()] == [LAST_NAME]


def test_a_link_is_copied_where_there_are_none_and_names_of_one_file_leave_nothing(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a.pth", {"number": 1})
    for _ in range(2):
        link_checkpoint(tmp_path / "a.pth", tmp_path / "b.pth")
    monkeypatch.setattr(os, "link", full_disk)
    link_checkpoint(tmp_path / "a.pth", tmp_path / "c.pth")
    assert read_checkpoint(tmp_path / "b.pth") == read_checkpoint(tmp_path / "c.pth") == {"number": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pth", "b.pth", "c.pth"]


def write(path, step):
    save_checkpoint(path, {"progress": asdict(Progress(step=step))})


def test_the_newest_checkpoint_that_is_whole_is_found(tmp_path, caplog):
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path / BEST_NAME, 1)
    assert newest_checkpoint(tmp_path).name == BEST_NAME
    for step in (2, 10):
        write(tmp_path / f"step_{step:08d}.pth", step)
    assert newest_checkpoint(tmp_path).name == "step_00000010.pth"
    link_checkpoint(tmp_path / "step_00000010.pth", tmp_path / LAST_NAME)
    assert newest_checkpoint(tmp_path).name == LAST_NAME
    write(tmp_path / "step_00000012.pth", 12)  # killed before it became last.pth
    assert newest_checkpoint(tmp_path).name == "step_00000012.pth"
    (tmp_path / "step_00000012.pth").write_bytes(b"half")
    assert newest_checkpoint(tmp_path).name == LAST_NAME and "step_00000012.pth: passed over" in caplog.text
    (tmp_path / LAST_NAME).unlink()
    assert newest_checkpoint(tmp_path).name == "step_00000010.pth"


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    write(tmp_path / LAST_NAME, 1)
    (tmp_path / "step_00000002.pth.tmp").write_bytes(b"half")
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LAST_NAME]


def test_an_epoch_with_another_number_of_batches_goes_on_at_the_same_part(tmp_path, caplog):
    class Half(Batches):
        def __len__(self):
            return 4

        def __iter__(self):
            return (batch for number, batch in enumerate(super().__iter__()) if number % 2)

    with pytest.raises(Stopped):
        run(tmp_path / "run", loader=StopsAt(0, 5))
    _, progress = run(tmp_path / "run", loader=Half(), resume=tmp_path / "run" / LAST_NAME, epochs=1)
    assert "the epoch had 8 batches and has 4 now: it goes on at batch 3" in caplog.text
    assert progress.epoch == 1 and progress.step > 6


def test_a_second_interrupt_stops_at_once_but_not_one_that_is_only_passed_on():
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell runs the tests in its background
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGINT
        signals._since -= 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_request_interrupts_where_it_may():
    with StopSignals() as signals:
        with pytest.raises(Stopped), signals.interrupting():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        with pytest.raises(Stopped), signals.interrupting():
            raise AssertionError("it was asked to stop before")
        with signals.interrupting(enabled=False):
            signal.raise_signal(signal.SIGTERM)
    assert signals.received == signal.SIGTERM


def test_changes_are_told_with_what_they_mean(tmp_path, caplog):
    saved = {
        "train": {"log_every": 50, "clip_grad_norm": 0.1},
        "optimizer": {"type": "AdamW", "lr": 1e-4},
        "data": {"root": "data"},
    }
    config = {**saved, "train": {"log_every": 20, "seed": 1}, "data": {"root": "data", "num_workers": 4}}
    report_changes(tmp_path, saved, config)
    assert caplog.messages == [
        "resuming with a changed data.num_workers: not set -> 4 (allowed; each step trains as before)",
        "resuming with a changed train.clip_grad_norm: 0.1 -> not set (allowed; from here on it is another run than "
        "before)",
        "resuming with a changed train.log_every: 50 -> 20 (allowed; each step trains as before)",
        "resuming with a changed train.seed: not set -> 1 (allowed; from here on it is another run than before)",
    ]
    with pytest.raises(ConfigError, match=r"lr cannot change while a run goes on \(optimizer\.lr: 0\.0001 -> 1\.0\)"):
        report_changes(tmp_path, saved, {**saved, "optimizer": {"type": "AdamW", "lr": 1.0}})


def test_a_launch_knows_its_run_again_and_no_other(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("detr", "detr-2"):
        (tmp_path / name).mkdir()

    def found(run_dir=None):
        return restarted_run([launch_of_process()], run_dir=run_dir, base=tmp_path / "detr")

    mark_launch(tmp_path / "detr", [launch_of_process()])
    assert found() is None
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    mark_launch(tmp_path / "detr-2", [launch_of_process()])
    assert found() is None  # a second command of one job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert found() == tmp_path / "detr-2" and found(tmp_path / "detr") == tmp_path / "detr"
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert found() is None
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name)
    alone = launch_of_process()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert found() is None and found(tmp_path / "detr") is None
    mark_launch(tmp_path / "detr", [alone, launch_of_process()])
    # The same agent starts again, though it counts no restart, as another machine's process failed.
    assert found() == found(tmp_path / "detr") == tmp_path / "detr"
    assert resume_command(tmp_path / "a run").startswith("torchrun --nproc-per-node 8 ")
    assert resume_command(tmp_path / "a run").endswith(f"--resume '{tmp_path / 'a run'}'")


def test_a_log_is_cut_where_the_checkpoint_is(tmp_path):
    lines = [{"kind": "train", "step": 4, "epoch": 1}, {"kind": "val", "step": 4, "epoch": 1},
             {"kind": "train", "step": 8, "epoch": 2}, {"kind": "val", "step": 8, "epoch": 2}]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)

    def kept(position, end=""):
        (tmp_path / LOG_NAME).write_text(text + end)
        with RunLog(tmp_path, position=position):
            pass
        return len((tmp_path / LOG_NAME).read_text().splitlines())

    assert kept(None) == kept((8, 2)) == 4
    assert kept((8, 2), end='{"kind": "tr') == 4
    assert kept((8, 1)) == 3  # stopped before the second epoch was evaluated
    assert kept((7, 1)) == 2 and kept((4, 0)) == 1 and kept((0, 0)) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    with RunLog(tmp_path) as log, Path("/dev/full").open("ab", buffering=0) as full:
        file, log._file = log._file, full
        log.validation({"step": 1, "epoch": 1, "metrics": {}}, epoch_label="")
        assert "/dev/full: not written (No space left on device); training goes on" in capsys.readouterr().out
        log._file = file
        log.validation({"step": 2, "epoch": 2, "metrics": {}}, epoch_label="")
    assert json.loads((tmp_path / LOG_NAME).read_text().strip())["step"] == 2
