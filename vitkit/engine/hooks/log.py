"""Reports a run's progress during training: lines on the console, log.jsonl, TensorBoard."""

import datetime
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit import devices
from vitkit.distributed import all_reduce_mean, all_reduce_sum, is_main
from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.logging import LOG_NAME, print_line
from vitkit.protocols.evaluator import is_measured
from vitkit.protocols.learning import Hook
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")
_MAX_SECONDS = 20.0
"""Longest time between two lines on the console, in seconds."""
_MAX_DATA_SHARE, _SECONDS_TO_JUDGE = 0.2, 30.0
"""The fraction of the time that a run may wait for data without a warning, and the least time that is judged."""


class ProgressLog(Hook):
    """Logs the mean losses of every `train.log_every` steps, each epoch's meters, and the evaluations.

    A record is printed as a line on the console, written to log.jsonl, and passed to every hook's `on_log`. The line
    has the loss and the metric; with `--verbose`, and in console.txt, all terms. If steps are slow, the console gets
    additional lines: after the first step, and when the last line is 20 seconds old; these show the losses of the main
    process only.
    """

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Open the log on the main process, and close it however the run ends; a resumed run appends to it."""
        self._resumed = run.progress.step > 0
        self._printed_at = -math.inf
        self._has_named_data = False
        self._evaluation_seconds: float | None = None
        self._metric = ""
        if not is_main():
            yield
            return
        path = run.run_dir / LOG_NAME
        last = cut_log(path, run.progress.step, run.progress.epoch) if path.exists() else {}
        self._clock = TrainingClock(last.get("minutes", 0.0), last.get("processor_minutes", 0.0))
        self._file, self._ends_with_newline = path.open("ab", buffering=0), True
        try:
            yield
        finally:
            with suppress(OSError):  # a write that failed because the disk is full fails again on closing
                self._file.close()

    def before_epoch(self, run: TrainRun) -> None:
        """Start a window of steps."""
        # Here, so that the time of an evaluation is not part of it.
        self._start = time.monotonic()
        self._sums: dict[str, Tensor] = {}
        self._num_batches = 0
        self._data_seconds = 0.0

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Add the step's losses, and log the window when it is due."""
        progress = run.progress
        self._data_seconds, self._lr = self._data_seconds + step.data_seconds, step.lr
        if step.decision.take:
            for losses in step.losses:
                for name, value in losses.items():  # sums stay on the device until they are logged
                    self._sums[name] = self._sums[name] + value if name in self._sums else value
                self._num_batches += 1
        is_due = progress.step % run.settings.log_every == 0 or progress.batch == progress.num_batches
        if is_due and self._num_batches:
            self._log_window(run, step.lr)
            self.before_epoch(run)
        elif self._num_batches and is_main() and time.monotonic() - self._printed_at >= _MAX_SECONDS:
            # Clocks of different ranks disagree, so this line does not wait for the losses of the others.
            means = (torch.stack(list(self._sums.values())) / self._num_batches).tolist()
            self._print(run, self._record(run, means, step.lr))

    def after_epoch(self, run: TrainRun) -> None:
        """Print the epoch's meters, and how many samples were replaced or padded."""
        if self._num_batches:  # a hook has ended the epoch between two records
            self._log_window(run, self._lr)
        ratios = {name: meter.compute(run.device) for name, meter in run.meters.items()}
        meters = "  ".join(f"{name} {ratio:.3f} of {count}" for name, (ratio, count) in ratios.items())
        notes = ""
        counts = torch.tensor([float(run.loader.num_skipped), float(run.loader.num_padded)], device=run.device)
        skipped, padded = map(int, all_reduce_sum(counts).tolist())
        since = "since the last --resume" if self._resumed else "so far"
        if skipped:
            notes += f"  {pluralize(skipped, 'samples')} with unusable files replaced {since}"
        if padded:
            notes += f"  {pluralize(padded, 'videos')} shorter than a clip padded"
        line = f"epoch {run.progress.epoch + 1}/{run.settings.epochs} done"
        print_line(f"{line}{notes}", full=f"{line}  {meters}{notes}")

    def after_evaluation(self, run: TrainRun, metrics: Mapping[str, float]) -> None:
        """Log the metrics; print the best one and the loss, and in full those that are not in the evaluator's table."""
        epoch, best = run.progress.epoch + 1, run.settings.best_metric
        texts = {name: f"{name} {value:.4g}" if is_measured(value) else f"{name} –" for name, value in metrics.items()}
        self._metric = texts.get(best or "", "")
        shown = [text for name, text in texts.items() if name in (best, "loss")]
        # Those of the table have a slash, such as bbox/AP.
        in_full = [text for name, text in texts.items() if "/" not in name or name == best]
        record = {"kind": "val", "step": run.progress.step, "epoch": epoch, "metrics": metrics}
        record |= self._clock.minutes() if is_main() else {}
        line = f"epoch {epoch}/{run.settings.epochs}  validation  "
        print_line(line + "  ".join(shown), full=line + "  ".join(in_full))
        _call_on_log(run, record)

    def on_log(self, run: TrainRun, record: Mapping[str, Any]) -> None:
        """Write a record to log.jsonl, with null for numbers that JSON cannot hold."""
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        line = (json.dumps(finite) + "\n").encode()
        # If a full disk cut a line off, the next one must not continue it.
        line = line if self._ends_with_newline else b"\n" + line
        try:
            self._ends_with_newline = self._file.write(line) == len(line)
        except OSError as error:
            self._ends_with_newline = False
            print_line(f"{self._file.name}: not written ({error.strerror}); training continues")

    @contextmanager
    def during_evaluation(self, run: TrainRun) -> Iterator[None]:
        """Measure how long the evaluation takes."""
        start = time.monotonic()
        with self._clock.pause() if is_main() else nullcontext():
            yield
        self._evaluation_seconds = time.monotonic() - start

    def _log_window(self, run: TrainRun, lr: float) -> None:
        """Log the means over batches and ranks since the last record."""
        means = all_reduce_mean(torch.stack(list(self._sums.values())) / self._num_batches).tolist()
        record = self._record(run, means, lr) | (self._clock.minutes() if is_main() else {})
        self._print(run, record)
        _call_on_log(run, record)
        # Shorter windows may consist of the start of the loading processes.
        is_long = time.monotonic() - self._start >= _SECONDS_TO_JUDGE
        if record["data_share"] > _MAX_DATA_SHARE and is_long and not self._has_named_data:
            self._has_named_data = True
            logger.warning(
                f"{100 * record['data_share']:.0f} % of the time is spent waiting for data. Resume with more loading "
                "processes (data.num_workers=auto takes all cores of this machine), or train on smaller image files."
            )

    def _record(self, run: TrainRun, means: Sequence[float], lr: float) -> dict[str, Any]:
        """Return the record of the window, given the mean losses and the last step's learning rate."""
        progress = run.progress
        seconds = max(time.monotonic() - self._start, 1e-9)
        return {
            "kind": "train",
            "step": progress.step,
            "epoch": round(progress.epoch + progress.batch / progress.num_batches, 6),
            "loss": sum(means),
            "losses": dict(zip(self._sums, means)),
            "lr": lr,
            "it_s": self._num_batches / run.settings.accumulate / seconds,
            "data_share": self._data_seconds / seconds,
            "memory_mb": peak_memory_mb(run.device),
        }

    def _print(self, run: TrainRun, record: Mapping[str, Any]) -> None:
        self._printed_at = time.monotonic()
        # Auxiliary layers repeat the final layer's terms, and are only written to the file.
        losses = record["losses"].items()
        terms = " ".join(f"{name} {value:.3f}" for name, value in losses if "aux" not in name)
        start = f"epoch {record['epoch']:.2f}/{run.settings.epochs}  step {record['step']}  loss {record['loss']:.3f}"
        metric = f"  {self._metric}" if self._metric else ""
        speed = (
            f"{record['it_s']:.2f} it/s  ETA {self._time_left(run, record['it_s'])}  "
            f"mem {record['memory_mb'] / 1024:.2f} GiB"
        )
        print_line(
            f"{start}{metric}  {speed}",
            full=f"{start} ({terms}){metric}  lr {record['lr']:.1e}  {speed}  data {record['data_share']:.0%}",
        )

    def _time_left(self, run: TrainRun, steps_per_second: float) -> str:
        """Estimate the time that the run's remaining steps and evaluations take, the latter as long as the last one."""
        settings, progress = run.settings, run.progress
        epochs_left = settings.epochs - progress.epoch - progress.batch / progress.num_batches
        seconds = epochs_left * math.ceil(progress.num_batches / settings.accumulate) / steps_per_second
        epochs = range(progress.epoch + 1, settings.epochs + 1)
        evaluations = sum(epoch % settings.eval_every == 0 or epoch == settings.epochs for epoch in epochs)
        if self._evaluation_seconds is None:
            return f"{datetime.timedelta(seconds=round(seconds))} + {pluralize(evaluations, 'evaluations')}"
        return str(datetime.timedelta(seconds=round(seconds + evaluations * self._evaluation_seconds)))


class TrainingClock:
    """Time spent on training, by the clock and by this process's processor time; evaluations do not count.

    Args:
        minutes, processor_minutes: those of the run's earlier part, up to the last record that a resumed run keeps.
    """

    def __init__(self, minutes: float, processor_minutes: float):
        self._start = time.monotonic() - 60 * minutes, time.process_time() - 60 * processor_minutes

    def minutes(self) -> dict[str, float]:
        """Return the minutes so far, as they are named in records."""
        wall, processor = time.monotonic() - self._start[0], time.process_time() - self._start[1]
        return {"minutes": round(wall / 60, 4), "processor_minutes": round(processor / 60, 4)}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time inside the context."""
        before = time.monotonic(), time.process_time()
        yield
        after = time.monotonic(), time.process_time()
        self._start = self._start[0] + after[0] - before[0], self._start[1] + after[1] - before[1]


class TensorBoard(Hook):
    """Writes the numbers of every record for TensorBoard, if it is installed; a full disk stops only this output."""

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Open its folder on the main process; for a resumed run, later points are removed."""
        self._writer = None
        if is_main():
            with suppress(ImportError), self._close_on_error():
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=run.progress.step + 1)
        try:
            yield
        finally:
            with self._close_on_error():
                if self._writer:
                    self._writer.close()

    def on_log(self, run: TrainRun, record: Mapping[str, Any]) -> None:
        """Write the record's numbers, such as train/lr, train/losses/l1 and val/metrics/bbox/AP."""
        if not self._writer:
            return
        values = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        for group in ("losses", "metrics"):
            values |= {f"{group}/{name}": value for name, value in record.get(group, {}).items()}
        with self._close_on_error():
            for name, value in values.items():
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            print_line(f"tensorboard: no longer written ({error.strerror or error}); training continues")


def _call_on_log(run: TrainRun, record: Mapping[str, Any]) -> None:
    if is_main():
        for hook in run.hooks:
            hook.on_log(run, record)


def cut_log(path: Path, step: int, epoch: int) -> dict[str, Any]:
    """Cut a log before its first record from after `step` steps or `epoch` complete epochs, or before a partial line.

    Returns:
        the last remaining record; an empty one if there is none.
    """
    length = 0
    last: dict[str, Any] = {}
    with path.open("r+b") as file:
        for line in file:
            try:
                record = json.loads(line)
                beyond = record["step"] > step or (record["kind"] == "val" and record["epoch"] > epoch)
            except (ValueError, KeyError, TypeError):
                record, beyond = last, False
            # A killed run wrote what follows after its last checkpoint, and writes it again when it is resumed.
            if beyond or not line.endswith(b"\n"):
                break
            length += len(line)
            last = record
        file.truncate(length)
    return last


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory of the accelerator's allocator, or of this process, in MiB."""
    if (peak := devices.peak_memory(device)) is not None:
        return peak / 2**20
    try:
        import resource  # only available on Unix
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
