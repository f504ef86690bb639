"""What is saved when, what is left when the disk is full, and which checkpoint is the newest."""

import errno
import logging
import math
import os
import random
import signal
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers.processes import PROCESSES
from helpers.toy_training import Batches, records, run, unseen_tensorboard_errors
from helpers.weights import assert_same_weights

from vitkit.engine import checkpointing
from vitkit.engine.checkpointing import Progress, find_newest_checkpoint, remove_stale, rng_state, set_rng_state
from vitkit.engine.hooks import Interrupted
from vitkit.engine.run_folder import FolderLock
from vitkit.errors import CheckpointError
from vitkit.weights import link_checkpoint, read_checkpoint, save_checkpoint
from vitkit.weights.locate import BEST_NAME, LAST_NAME


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


def test_failed_evaluation_loses_no_epoch(tmp_path):
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
    assert_same_weights(resumed, whole)
    assert [r["metrics"] for r in records(tmp_path / "whole", "val")] == [
        r["metrics"] for r in records(tmp_path / "parts", "val")
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", "schedule", "progress", "rng", "meters"])
def test_checkpoint_with_a_part_of_the_wrong_type_is_an_error_that_names_it(tmp_path, name):
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
def test_run_resumed_within_an_epoch_equals_an_uninterrupted_one(tmp_path, options, where):
    whole, _ = run(tmp_path / "whole", **options)
    with pytest.raises(Interrupted) as interrupted:
        run(tmp_path / "parts", loader=StopsAt(*where), **options)
    assert interrupted.value.code == 143
    resumed, progress = run(tmp_path / "parts", resume=tmp_path / "parts" / LAST_NAME, **options)
    a, b = (read_checkpoint(tmp_path / name / LAST_NAME) for name in ("whole", "parts"))
    assert a["progress"] == b["progress"] == asdict(progress)
    for key in {"model", "ema"} & a.keys():
        assert all(value.equal(b[key][name]) for name, value in a[key].items())
    assert a["scaler"] == b["scaler"] and a["schedule"] == b["schedule"]
    assert_same_weights(resumed, whole)
    assert all(x["close"].equal(y["close"]) for x, y in zip(a["meters"], b["meters"], strict=True))
    # In the last, partial line of the epoch, only the mean of the losses starts anew.
    positions = [[(r["step"], r["lr"]) for r in records(tmp_path / name, "train")] for name in ("whole", "parts")]
    assert positions[0] == positions[1]


def test_checkpoints_within_epochs_are_saved_by_steps_or_time_and_old_ones_removed(tmp_path, monkeypatch):
    seen = []
    save = checkpointing.save_checkpoint

    def recorded(path, state):
        seen.append(path.name)
        save(path, state)

    monkeypatch.setattr(checkpointing, "save_checkpoint", recorded)
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


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}])
def test_best_checkpoint_contains_only_the_evaluated_weights(tmp_path, options):
    metrics, evaluated = iter([0.5, 0.2]), []

    def evaluate(model):
        evaluated.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"bbox/AP": next(metrics)}

    run(tmp_path / "run", evaluate=evaluate, epochs=2, **options)
    best, last = (read_checkpoint(tmp_path / "run" / name) for name in (BEST_NAME, LAST_NAME))
    assert best.keys() == {"model", "progress", "classes"}
    assert best["progress"]["epoch"] == 1 and last["progress"]["epoch"] == 2 and best["progress"]["best"] == 0.5
    assert best["model"].keys() == evaluated[0].keys()
    assert all(value.equal(evaluated[0][name]) for name, value in best["model"].items())
    with pytest.raises(CheckpointError, match="cannot be resumed, it lacks .*optimizer.* use --init"):
        run(tmp_path / "run", resume=tmp_path / "run" / BEST_NAME, **options)


def full_disk(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_keeps_the_previous_checkpoint_and_training_continues(tmp_path, monkeypatch, caplog):
    fsync, calls = os.fsync, []

    def full_at_times(file):
        calls.append(file)
        full_disk() if 4 <= len(calls) <= 5 else fsync(file)

    monkeypatch.setattr(os, "fsync", full_at_times)
    kept = []
    run(tmp_path / "run", epochs=3, evaluate=lambda m: kept.append(read_checkpoint(tmp_path / "run" / LAST_NAME)) or {})
    assert [state["progress"]["epoch"] for state in kept] == [0, 1, 1]  # the second epoch's was not written
    assert "last.pth: not saved (No space left on device). The previous checkpoint is intact" in caplog.text
    assert read_checkpoint(tmp_path / "run" / LAST_NAME)["progress"]["epoch"] == 3
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize("full_at", [BEST_NAME, LAST_NAME])
def test_best_checkpoint_that_was_not_written_does_not_count_as_best(tmp_path, monkeypatch, full_at):
    metrics, evaluated = iter([0.5, 0.4, 0.3]), []

    def evaluate(model):
        evaluated.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"bbox/AP": next(metrics)}

    def full_after_the_first_epoch(path, state, save=checkpointing.save_checkpoint):
        if path.name == full_at and state["progress"]["epoch"] == 1:
            raise CheckpointError(f"{path}: not saved (No space left on device).")
        save(path, state)

    monkeypatch.setattr(checkpointing, "save_checkpoint", full_after_the_first_epoch)
    # A save within the next epoch must not write its current weights as best.pth.
    _, progress = run(tmp_path / "run", evaluate=evaluate, epochs=3, save_every_steps=3)
    best = read_checkpoint(tmp_path / "run" / BEST_NAME)
    epoch = 2 if full_at == BEST_NAME else 1
    assert best["progress"]["epoch"] == epoch and progress.best == best["progress"]["best"] == [0.5, 0.4][epoch - 1]
    assert all(value.equal(evaluated[epoch - 1][name]) for name, value in best["model"].items())


def full_below(folder, monkeypatch, number=errno.ENOSPC):
    """Let every write of a checkpoint below a folder fail."""
    fsync = os.fsync

    def failing(file):
        if os.path.realpath(f"/proc/self/fd/{file}").startswith(f"{folder}/"):
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("options", [{"ema_decay": 0.9}, {"keep_checkpoints": 2}])
def test_last_state_that_cannot_be_saved_is_an_error_and_leaves_the_previous(tmp_path, monkeypatch, number, options):
    run(tmp_path / "run", epochs=1, **options)
    resume = tmp_path / "run" / LAST_NAME
    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
        full_below(tmp_path / "run", patch, number)
        run(tmp_path / "run", epochs=2, resume=resume, **options)
    assert f"not saved ({os.strerror(number)})" in str(error.value)
    assert read_checkpoint(resume)["progress"]["epoch"] == 1
    _, progress = run(tmp_path / "run", epochs=2, resume=resume, **options)
    assert progress.epoch == 2


def test_early_stopping_on_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def evaluate(model):
        full_below(tmp_path / "run", monkeypatch)
        return {"bbox/AP": math.nan}

    with pytest.raises(CheckpointError, match="not saved"):
        run(tmp_path / "run", evaluate=evaluate, patience=1)


@pytest.mark.parametrize("replaced", [False, True])
def test_run_whose_folder_is_removed_ends_without_writing_into_another(tmp_path, replaced):
    folder = tmp_path / "run"
    lock = FolderLock(folder, option="--run-dir")

    def remove(model):
        folder.rename(tmp_path / "removed")  # rmtree would race with TensorBoard, which writes there and fails now
        if replaced:
            folder.mkdir()
            (folder / LAST_NAME).write_text("another run's")
        return {}

    with (
        unseen_tensorboard_errors(),
        pytest.raises(CheckpointError, match=r"run: was removed, or replaced by .* while this run was training\."),
    ):
        run(folder, evaluate=remove, owns_folder=lock.is_mine)
    lock.release()
    assert not folder.exists() or (folder / LAST_NAME).read_text() == "another run's"


def test_full_disk_error_of_torch_is_recognized(tmp_path, monkeypatch):
    def save(state, file):
        try:
            full_disk()
        finally:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(CheckpointError, match=r"a\.pth: not saved \(No space left on device\)\. Free some space"):
        save_checkpoint(tmp_path / "a.pth", {})


def save_with_little_room(folder):
    """Save in a process that may not write files above 1 MiB."""
    import resource  # only available on Unix

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    save_checkpoint(folder / LAST_NAME, {"a": torch.zeros(100_000)})
    try:
        save_checkpoint(folder / LAST_NAME, {"a": torch.zeros(300_000)})
    except CheckpointError as error:
        (folder / "error.txt").write_text(str(error))


def test_incompletely_written_file_leaves_the_previous_one(tmp_path):
    process = PROCESSES.Process(target=save_with_little_room, args=(tmp_path,))
    process.start()
    process.join()
    message = (tmp_path / "error.txt").read_text()
    assert "last.pth: not saved (File too large). The previous checkpoint is intact" in message
    assert len(read_checkpoint(tmp_path / LAST_NAME)["a"]) == 100_000
    assert not list(tmp_path.glob("*.tmp"))


def test_linking_falls_back_to_copying_and_leaves_no_temporary_files(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a.pth", {"number": 1})
    for _ in range(2):
        link_checkpoint(tmp_path / "a.pth", tmp_path / "b.pth")
    monkeypatch.setattr(os, "link", full_disk)
    link_checkpoint(tmp_path / "a.pth", tmp_path / "c.pth")
    assert read_checkpoint(tmp_path / "b.pth") == read_checkpoint(tmp_path / "c.pth") == {"number": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pth", "b.pth", "c.pth"]


def write(path, step):
    save_checkpoint(path, {"progress": asdict(Progress(step=step))})


def test_random_state_continues_as_if_uninterrupted():
    state = rng_state()
    first = torch.rand(3), np.random.rand(3), random.random()
    set_rng_state(state)
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(first[0], again[0]) and (first[1] == again[1]).all() and first[2] == again[2]


def test_newest_complete_checkpoint_is_found(tmp_path, caplog):
    assert find_newest_checkpoint(tmp_path) is None
    write(tmp_path / BEST_NAME, 1)
    assert find_newest_checkpoint(tmp_path) is None  # it has only weights
    for step in (2, 10):
        write(tmp_path / f"step_{step:08d}.pth", step)
    assert find_newest_checkpoint(tmp_path).name == "step_00000010.pth"
    link_checkpoint(tmp_path / "step_00000010.pth", tmp_path / LAST_NAME)
    assert find_newest_checkpoint(tmp_path).name == LAST_NAME
    write(tmp_path / "step_00000012.pth", 12)  # killed before it became last.pth
    assert find_newest_checkpoint(tmp_path).name == "step_00000012.pth"
    (tmp_path / "step_00000012.pth").write_bytes(b"half")
    assert find_newest_checkpoint(tmp_path).name == LAST_NAME and "step_00000012.pth: skipped" in caplog.text
    (tmp_path / LAST_NAME).unlink()
    assert find_newest_checkpoint(tmp_path).name == "step_00000010.pth"


def test_partial_files_of_a_killed_run_are_removed(tmp_path):
    write(tmp_path / LAST_NAME, 1)
    (tmp_path / "step_00000002.pth.tmp").write_bytes(b"half")
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LAST_NAME]


def test_epoch_with_another_number_of_batches_resumes_at_the_same_fraction(tmp_path, caplog):
    class Half(Batches):
        def __len__(self):
            return 4

        def __iter__(self):
            return iter(list(super().__iter__())[: 4 - self.batch])

    with pytest.raises(Interrupted):
        run(tmp_path / "run", loader=StopsAt(0, 5))
    _, progress = run(tmp_path / "run", loader=Half(), resume=tmp_path / "run" / LAST_NAME, epochs=1)
    assert "the epoch had 8 batches and has 4 now: it continues at batch 3" in caplog.text
    assert progress.epoch == 1 and progress.step == 7
