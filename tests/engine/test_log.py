"""Console lines, log.jsonl and TensorBoard."""

import errno
import json
import math
import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.toy_training import unseen_tensorboard_errors

from vitkit.engine.checkpointing import Progress
from vitkit.engine.hooks.log import ProgressLog, TensorBoard, cut_log, peak_memory_mb
from vitkit.engine.step import Decision, Step
from vitkit.logging import CONSOLE_NAME, LOG_NAME, ConsoleCopy, setup_logging

STEP = Step(
    losses=[{"labels": torch.tensor(1.0), "l1": torch.tensor(2.0), "aux0_labels": torch.tensor(0.5)}],
    grad_norm=torch.tensor(1.0),
    lr=1e-4,
    decision=Decision(take=True, save=False, stop=False),
    data_seconds=0.0,
)
METRICS = {"bbox/AP": 0.25, "loss": 3.0}
VAL = {"kind": "val", "step": 40, "epoch": 1, "metrics": METRICS}


def run_of(run_dir):
    """Return a run of two epochs, after ten of the twenty batches of the first one."""
    return SimpleNamespace(
        run_dir=run_dir,
        hooks=[ProgressLog(), TensorBoard()],
        settings=SimpleNamespace(epochs=2, accumulate=1, log_every=10, eval_every=1, best_metric="bbox/AP"),
        progress=Progress(step=20, batch=10, num_batches=20),
        device=torch.device("cpu"),
    )


def write(run_dir, metrics=METRICS):
    """Log a window of one step, and an evaluation."""
    run = run_of(run_dir)
    with ExitStack() as spans:
        for hook in run.hooks:
            spans.enter_context(hook.during_training(run))
        for hook in run.hooks:
            hook.before_epoch(run)
            hook.after_step(run, STEP)
        run.progress.step = 40
        for hook in run.hooks:
            hook.after_evaluation(run, metrics)


def lines_of(run, seconds, capsys):
    """Take a step; return the lines that are printed if the last line is `seconds` old."""
    log = run.hooks[0]
    log._printed_at = min(log._printed_at, time.monotonic()) - seconds
    run.progress.step += 1
    run.progress.batch += 1
    log.after_step(run, STEP)
    return capsys.readouterr().out.splitlines()


def records(run_dir):
    return [json.loads(line) for line in (run_dir / LOG_NAME).read_text().splitlines()]


def test_a_run_that_waits_for_data_names_the_override_once(tmp_path, caplog):
    run = run_of(tmp_path)
    (log, _) = run.hooks
    run.hooks = [log]
    with log.during_training(run):
        for seconds, waited in ((1, 0.9), (100, 10), (100, 30), (100, 60)):
            log.before_epoch(run)
            log._start -= seconds
            log.after_step(run, STEP._replace(data_seconds=waited))
    (message,) = caplog.messages
    assert message.startswith("30 % of the time is spent waiting for data. ") and "data.num_workers=auto" in message


def test_records_are_json_lines_and_a_resumed_run_appends(tmp_path):
    write(tmp_path)
    train, val = records(tmp_path)
    expected = {"kind": "train", "step": 20, "epoch": 0.5, "loss": 3.5, "lr": 1e-4}
    assert train.items() >= expected.items() and train["losses"] == {"labels": 1.0, "l1": 2.0, "aux0_labels": 0.5}
    assert {"it_s", "data_share", "memory_mb"} <= train.keys()
    assert val.items() >= VAL.items()
    write(tmp_path)
    assert [record["step"] for record in records(tmp_path)] == [20, 20, 40]  # step 40 is after this run's position


def test_non_finite_numbers_become_null(tmp_path):
    write(tmp_path, metrics={"bbox/AP": math.nan, "loss": math.inf})
    assert records(tmp_path)[1]["metrics"] == {"bbox/AP": None, "loss": None}


@pytest.fixture
def console(tmp_path):
    """Return a function that begins console.txt, and later returns its lines without their time."""
    with ConsoleCopy() as copy:
        copy.begin(tmp_path / CONSOLE_NAME)
        yield lambda: [line[20:] for line in (tmp_path / CONSOLE_NAME).read_text().splitlines()]


@pytest.mark.parametrize("verbose", [False, True])
def test_console_shows_loss_and_metric_and_its_file_every_term(tmp_path, capsys, console, verbose):
    setup_logging(verbose=verbose)
    metrics = {**METRICS, "train_matched_accuracy": 1.0, "bbox/APs": 0.5}
    write(tmp_path, metrics)
    printed = capsys.readouterr().out.splitlines()
    short = r"epoch 0\.50/2  step 20  loss 3\.500  \S+ it/s  ETA \S+ \+ 2 evaluations  mem \S+ GiB"
    full = short.replace(r"3\.500", r"3\.500 \(labels 1\.000 l1 2\.000\)  lr 1\.0e-04") + r"  data \d+%"
    assert re.fullmatch(full if verbose else short, printed[0]) and re.fullmatch(full, console()[0])
    short = "epoch 1/2  validation  bbox/AP 0.25  loss 3"
    assert printed[1] == short + ("  train_matched_accuracy 1" if verbose else "")
    assert console()[1] == short + "  train_matched_accuracy 1"
    setup_logging()


def test_a_step_shows_the_last_best_metric(tmp_path, capsys):
    run = run_of(tmp_path)
    log = run.hooks[0]
    run.hooks = [log]
    with log.during_training(run):
        log.after_evaluation(run, {"bbox/AP": 0.25, "loss": 3.0})
        log.before_epoch(run)
        capsys.readouterr()
        assert "loss 3.500  bbox/AP 0.25  " in lines_of(run, 21, capsys)[0]


def test_ranks_other_than_the_main_one_write_and_print_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitkit.engine.hooks.log.is_main", lambda: False)
    monkeypatch.setattr("vitkit.logging.is_main", lambda: False)
    write(tmp_path)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_scalars_are_written_to_tensorboard_if_installed(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "train/losses/l1", "val/metrics/bbox/AP"} <= set(events.Tags()["scalars"])
    (point,) = events.Scalars("val/metrics/bbox/AP")
    assert (point.step, point.value) == (40, 0.25)


def test_other_logs_are_written_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_tensorboard_gets_every_number_of_a_record():
    points = []
    board = TensorBoard()
    board._writer = SimpleNamespace(add_scalar=lambda *point: points.append(point))
    board.on_log(None, VAL)
    board.on_log(None, {"kind": "train", "step": 4, "lr": 0.1, "losses": {"l1": 2.0}})
    assert points == [
        ("val/epoch", 1, 40),
        ("val/metrics/bbox/AP", 0.25, 40),
        ("val/metrics/loss", 3.0, 40),
        ("train/lr", 0.1, 4),
        ("train/losses/l1", 2.0, 4),
    ]


def test_peak_memory_of_the_process_is_in_mebibytes():
    assert 20 < peak_memory_mb(torch.device("cpu")) < 2**20


def test_resumed_log_is_truncated_at_the_checkpoint(tmp_path):
    lines = [
        {"kind": "train", "step": 4, "epoch": 1},
        {"kind": "val", "step": 4, "epoch": 1},
        {"kind": "train", "step": 8, "epoch": 2},
        {"kind": "val", "step": 8, "epoch": 2},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)

    def num_lines_left(step, epoch, end=""):
        (tmp_path / LOG_NAME).write_text(text + end)
        cut_log(tmp_path / LOG_NAME, step, epoch)
        return len(records(tmp_path))

    assert num_lines_left(8, 2) == num_lines_left(8, 2, end='{"kind": "tr') == 4
    assert num_lines_left(8, 1) == 3  # stopped before the second epoch was evaluated
    assert num_lines_left(7, 1) == 2 and num_lines_left(4, 0) == 1 and num_lines_left(0, 0) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_unwritable_log_does_not_end_the_run(tmp_path, capsys):
    run = run_of(tmp_path)
    log = run.hooks[0]
    with log.during_training(run), Path("/dev/full").open("ab", buffering=0) as full:
        file, log._file = log._file, full
        log.on_log(run, VAL)
        assert "/dev/full: not written (No space left on device); training continues" in capsys.readouterr().out
        log._file = file
        log.on_log(run, VAL)
    assert json.loads((tmp_path / LOG_NAME).read_text().strip()) == VAL


def test_tensorboard_on_a_full_disk_is_reported_once_and_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    write_record, written = writer.RecordWriter.write, []

    def full_after_ten(self, data):
        if len(written) == 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(data)
        write_record(self, data)

    monkeypatch.setattr(writer.RecordWriter, "write", full_after_ten)
    board, run = TensorBoard(), run_of(tmp_path)
    with unseen_tensorboard_errors(), board.during_training(run):
        for step in range(50):
            board.on_log(run, {**VAL, "step": step})
    captured = capsys.readouterr()
    assert captured.out == "tensorboard: no longer written (No space left on device); training continues\n"


def test_tensorboard_that_cannot_start_does_not_end_the_run(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").touch()
    board, run = TensorBoard(), run_of(tmp_path)
    with board.during_training(run):
        board.on_log(run, VAL)
    assert capsys.readouterr().out.count("tensorboard: no longer written (") == 1


def test_console_prints_after_the_first_step_and_then_at_intervals(tmp_path, capsys):
    run = run_of(tmp_path)
    run.settings.log_every = 50
    with run.hooks[0].during_training(run):
        run.hooks[0].before_epoch(run)
        (line,) = lines_of(run, 0, capsys)
        assert "step 21 " in line and "loss 3.500" in line
        assert lines_of(run, 0, capsys) == []
        (line,) = lines_of(run, 21, capsys)
        assert "step 23 " in line
    assert records(tmp_path) == []  # its steps do not depend on the time


def test_remaining_time_includes_evaluations(tmp_path, capsys):
    run = run_of(tmp_path)
    run.settings.epochs, run.settings.eval_every = 5, 2
    log = run.hooks[0]
    with log.during_training(run):
        # Four and a half epochs of 20 steps are left, and the evaluations after the second, fourth and fifth.
        assert log._time_left(run, 1.0) == "0:01:30 + 3 evaluations"
        with log.during_evaluation(run):
            pass
        log._evaluation_seconds = 100.0
        assert log._time_left(run, 1.0) == "0:06:30"


def test_console_omits_unmeasured_numbers_and_those_of_the_table(tmp_path, capsys):
    write(tmp_path, metrics={"bbox/AP": -1.0, "bbox/APs": -1.0, "segm/AP": 0.5, "loss": 2.0})
    assert capsys.readouterr().out.splitlines()[-1] == "epoch 1/2  validation  bbox/AP –  loss 2"
