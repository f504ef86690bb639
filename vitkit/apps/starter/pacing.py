"""Keeps a run within its time: it is planned again where steps take longer than planned, and ends with the time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vitkit.apps.training import api
from vitkit.apps.training.api import Run
from vitkit.engine.hooks import Hook
from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.logging import print_line

EVALUATIONS_AFTERWARDS = 2.5
"""The time that is kept after training, in evaluations: that of the last weights, one for the report, and its figures.
"""
ASSUMED_SHARE = 0.04
"""The fraction of the time that an evaluation is assumed to take before the first one."""
SHARE_BETWEEN_PLANS = 0.1
"""The least fraction of the time between two looks at the plan."""
TOO_SLOW = 1.1
"""The expected time over the available one above which the run is planned again."""
MUCH_LEFT = 0.25
"""The fraction of the available time that would be left over, above which the run is planned again."""
BUSY_BELOW = 0.5
"""The part of a core below which a run is said to get little of it."""


def note_if_busy(minutes: float, processor_minutes: float) -> str:
    """Return a note if a process got little of a core in some time; else ""."""
    share = processor_minutes / minutes if minutes > 0 else 1.0
    return (
        "" if share >= BUSY_BELOW else f"gets {share:.1g} of a core, as other programs are busy: end them, if you can"
    )


def train_until(
    deadline: float,
    plan: Callable[[int, float], Mapping[str, int]],
    *,
    seconds: float,
    hooks: Sequence[Hook] = (),
    **how: Any,
) -> Run:
    """Train until a time, with pauses in which the epochs are fitted to what a step takes.

    Args:
        deadline: when everything has to end, on the monotonic clock.
        plan: takes the number of epochs and the minutes of a step; returns the new values of the config's `train`.
        seconds: the time from the beginning to the deadline.
        hooks, how: the arguments of `vitkit.train`.
    """
    pace = Pace(deadline, seconds)
    while True:
        run = api.train(**how, hooks=[pace, *hooks])
        if pace.epochs is None:
            return run
        how = dict(resume=run.path, train=plan(pace.epochs, pace.step_seconds / 60), device=how.get("device"))
        pace = Pace(deadline, seconds, evaluation_seconds=pace.evaluation_seconds)


class Pace(Hook):
    """Ends a run in time, after the epoch in which its plan turns out wrong, or in the middle of one at the deadline.

    Args:
        deadline: time on the monotonic clock by which everything is to be over, in seconds.
        seconds: the time from the beginning to the deadline.
        evaluation_seconds: what an evaluation takes; None: not known yet.

    Attributes:
        epochs: the number of epochs for which there is time, if the run is to be planned again; None: it was right.
        step_seconds: what a step takes.
    """

    def __init__(self, deadline: float, seconds: float, *, evaluation_seconds: float | None = None):
        self.deadline, self.seconds, self.evaluation_seconds = deadline, seconds, evaluation_seconds
        self.epochs: int | None = None
        self.step_seconds = 0.0
        self._is_over = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """See `Hook`."""
        self._look(run)
        self._steps = self._training_seconds = 0.0
        yield

    def _look(self, run: TrainRun) -> None:
        """Begin the time between two looks at the plan."""
        self._looked = self._last = time.monotonic()
        self._processor = time.process_time()

    def before_epoch(self, run: TrainRun) -> None:
        """Leave out the time of evaluations."""
        self._last = time.monotonic()

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Look at the clock."""
        now = time.monotonic()
        self._steps += 1
        self._training_seconds += now - self._last
        self._last = now
        self.step_seconds = self._training_seconds / self._steps
        if now + self.step_seconds >= self._end_of_training():
            self._is_over = True
            print_line(f"ending with step {run.progress.step}, as the time is over")
        elif now - self._looked >= SHARE_BETWEEN_PLANS * self.seconds:
            note = note_if_busy(now - self._looked, time.process_time() - self._processor)
            if note and run.device.type == "cpu":
                print_line(f"busy: the run {note}; a step takes {self.step_seconds:.2f} s")
            self._look(run)

    def _end_of_training(self) -> float:
        """Return the time on the clock at which training ends, so that there is time for what follows."""
        return self.deadline - EVALUATIONS_AFTERWARDS * self._evaluation_seconds()

    def _evaluation_seconds(self) -> float:
        return ASSUMED_SHARE * self.seconds if self.evaluation_seconds is None else self.evaluation_seconds

    def after_epoch(self, run: TrainRun) -> None:
        """Compare the time that the other epochs will take with the time that there is."""
        done = run.progress.epoch + 1
        left = run.settings.epochs - done
        if self._is_over or left == 0:
            return
        evaluations = left // run.settings.eval_every
        available = self._end_of_training() - time.monotonic() - evaluations * self._evaluation_seconds()
        epoch_seconds = self.step_seconds * run.progress.num_batches
        expected = left * epoch_seconds
        if available < 0.5 * epoch_seconds:
            self._is_over = True
            print_line(f"ending with epoch {done}, as there is no time for another one")
        elif expected > TOO_SLOW * available or available - expected > max(
            MUCH_LEFT * available, SHARE_BETWEEN_PLANS * self.seconds
        ):
            epochs = done + max(1, int(available / epoch_seconds))
            self.epochs = epochs if epochs != run.settings.epochs else None

    @contextmanager
    def during_evaluation(self, run: TrainRun) -> Iterator[None]:
        """Measure how long it takes."""
        started = time.monotonic()
        yield
        self.evaluation_seconds = time.monotonic() - started

    def ends_epoch(self, run: TrainRun) -> bool:
        """See `Hook`."""
        return self._is_over

    def should_end(self, run: TrainRun) -> bool:
        """Whether the time is over, or the run is to be planned again."""
        return self._is_over or self.epochs is not None
