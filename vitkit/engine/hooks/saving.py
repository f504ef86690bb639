"""Hooks that save checkpoints or stop a run early: the best metric, failing evaluations, signals, and the clock."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FrameType

from vitkit.distributed import broadcast_object, is_main
from vitkit.engine.parallel import is_sharded
from vitkit.engine.run import TrainRun
from vitkit.errors import ConfigError
from vitkit.logging import print_line
from vitkit.protocols.evaluator import is_measured
from vitkit.protocols.learning import Hook
from vitkit.registry import nearest
from vitkit.weights.locate import BEST_NAME, LAST_NAME

# torchrun forwards ctrl-C to processes to which the terminal has already sent it.
_SAME_REQUEST_SECONDS = 1.0


class Interrupted(SystemExit):
    """Raised when a run has saved its state and ends because a signal requested it.

    The exit status is 128 + the signal's number, 143 for SIGTERM and 130 for SIGINT, as in shells.
    """

    command: str | None = None
    """The command that goes on with the run, which a hook may set; None: that of `vitkit train`."""

    def __init__(self, number: signal.Signals):
        # 0 would tell a scheduler that the run is complete, and 1 that it failed.
        super().__init__(128 + number)
        self.signal = number


class BestMetric(Hook):
    """Keeps the best value of `train.best_metric`; ends a run after `train.patience` evaluations without a better one.

    The trainer saves an epoch as best.pth if its evaluation has reached `progress.best`: of equal values, such as a
    metric that stays 0 at first, the later weights are the best, though not better. An evaluation whose metric has
    no value (see `is_measured`) is neither better nor worse than others: if none has a value, there is no best.pth, and
    last.pth is used.
    """

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`; the best value by another metric, or on other data, than the resumed run's is discarded."""
        name, progress = run.settings.best_metric, run.progress
        has_other_data = progress.val_data not in ("", run.val_data)
        if name is not None and progress.best_metric and (has_other_data or progress.best_metric != name):
            why = "data.val is not what it was" if has_other_data else f"best.pth is now selected by {name}"
            print_line(f"{why}; the best {progress.best_metric} so far no longer counts")
            progress.best, progress.worse_in_a_row = -math.inf, 0
        progress.val_data = run.val_data
        if name is None and (best := run.run_dir / BEST_NAME).is_file():
            print_line(
                f"train.best_metric=none: {best}, the best by {progress.best_metric} so far, stays, and is used in "
                f"place of later weights. Remove it to use {LAST_NAME}."
            )
        if self.should_end(run):
            print_line(
                f"this run was stopped early: {progress.worse_in_a_row} evaluations without a better {name}, and "
                f"train.patience={run.settings.patience}. Raise train.patience to continue training."
            )
        yield

    def after_evaluation(self, run: TrainRun, metrics: Mapping[str, float]) -> None:
        """Compare the metric with the best value so far."""
        name, progress = run.settings.best_metric, run.progress
        if name is None:
            return
        if name not in metrics:
            print_line(
                f"train.best_metric={name}: not among the metrics, so there is no best.pth. {nearest(name, metrics)}"
            )
            return
        progress.best_metric = name
        if not is_measured(metrics[name]):
            best = "best.pth stays as it is" if progress.best > -math.inf else "there is no best.pth"
            print_line(
                f"train.best_metric={name}: has no value ({metrics[name]:g}), as of data without objects: {best}"
            )
            return
        value = -metrics[name] if name in run.lower_is_better else metrics[name]
        progress.worse_in_a_row = 0 if value > progress.best else progress.worse_in_a_row + 1
        if value >= progress.best:
            progress.best, progress.best_step = value, progress.step
        if self.should_end(run):
            print_line(f"stopping early: {progress.worse_in_a_row} evaluations without a better {name}")

    def should_end(self, run: TrainRun) -> bool:
        """Return whether no patience is left."""
        patience = run.settings.patience
        return patience is not None and run.progress.worse_in_a_row >= patience


class FailedEvaluation(Hook):
    """Saves an epoch whose evaluation fails."""

    @contextmanager
    def during_evaluation(self, run: TrainRun) -> Iterator[None]:
        """Save the epoch if the evaluation fails, with the random states and meters from before the evaluation."""
        before = run.checkpoints.per_rank_state()
        sharded = is_sharded(run.model)
        if sharded:  # ranks cannot save a sharded model if others may have failed
            run.checkpoints.save(run.progress, per_rank=before)
        try:
            yield
        except BaseException as error:  # including ctrl-C and SystemExit; the exception is raised again
            if not sharded:
                run.checkpoints.save(run.progress, raise_on_error=isinstance(error, Interrupted), per_rank=before)
            raise


class Signals(Hook):
    """Treats SIGTERM and SIGINT as requests to stop after the current step; a second SIGINT stops at once."""

    def __init__(self) -> None:
        self._received_at = 0.0
        self._interrupts = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Handle the signals until the training ends."""
        handlers = {}
        # Python delivers signals only to the main thread, and does not let other threads set handlers.
        if threading.current_thread() is threading.main_thread():
            receive = partial(self._receive, run)
            handlers = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @contextmanager
    def during_evaluation(self, run: TrainRun) -> Iterator[None]:
        """Let a request end the evaluation at once.

        Raises:
            Interrupted: a signal was received, during the evaluation or before it.
        """
        # An evaluation changes no weights, so the run can be saved without its end.
        self._interrupts = not is_sharded(run.model)  # ranks of a sharded model could not save, see `FailedEvaluation`
        try:
            if self._interrupts and run.guard.stop_signal is not None:
                raise Interrupted(run.guard.stop_signal)
            yield
        finally:
            self._interrupts = False

    def _receive(self, run: TrainRun, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if run.guard.stop_signal is None:
            run.guard.stop_signal, self._received_at = signal.Signals(number), now
            if is_main():
                # Whatever is being printed when the signal arrives, this must not wait for it.
                os.write(2, f"{run.guard.stop_signal.name}: ending after this step, with a checkpoint\n".encode())
        elif number == signal.SIGINT and now - self._received_at > _SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt
        if self._interrupts:
            self._interrupts = False
            raise Interrupted(run.guard.stop_signal)


class EndAfter(Hook):
    """End the run after the epoch in which a time is reached; resuming it without this hook trains the other epochs.

    Args:
        minutes: time since the start of training, or since it was resumed.
    Raises:
        ConfigError: the time is not above 0.
    """

    def __init__(self, *, minutes: float):
        if not minutes > 0:
            raise ConfigError(f"EndAfter: minutes={minutes}: expected a value above 0.")
        self.minutes = minutes
        self.is_over = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        self._began, self.is_over = time.monotonic(), False
        yield

    def after_epoch(self, run: TrainRun) -> None:
        """Read the main process's clock."""
        self.is_over = broadcast_object(time.monotonic() - self._began >= 60 * self.minutes)
        if self.is_over:
            print_line(f"ending with this epoch, as {self.minutes:.3g} minutes have passed")

    def should_end(self, run: TrainRun) -> bool:
        """Return whether the time was reached in an earlier epoch."""
        return self.is_over
