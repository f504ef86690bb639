"""A run within a given time, as `vitkit start` and `vitkit pretrain` make it: a config whose settings are chosen by
timing a few steps, and a training whose epochs are fitted to what a step takes, and which ends with the time.
"""

import bisect
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitkit.apps.starter.child_runs import StepCost, time_steps
from vitkit.apps.training import api
from vitkit.apps.training.api import Run
from vitkit.config import load_config
from vitkit.config.overrides import split_override
from vitkit.engine.hooks import Hook
from vitkit.engine.run import TrainRun
from vitkit.engine.run_folder import writing_into
from vitkit.engine.step import Step
from vitkit.io.folders import OUTPUT_LIST, declare_output
from vitkit.logging import print_line
from vitkit.text_format import pluralize

CONFIG = "config.py"
"""The file in the run's folder that the chosen settings are written to."""
TRAINING_SHARE = 0.8
"""The fraction of the time for training; the rest is for evaluations, figures and the report."""
TIMING_SHARE = 0.01
"""The minimum fraction of the time for which each of the compared settings is timed."""
LONGEST_TIMING = 3.0
"""The number of minutes that are always enough to time a setting, as the pace is measured again during training."""
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


class TimedRequest:
    """A user's request with a time limit."""

    hours: float
    """The wall-clock time for everything."""
    overrides: Sequence[str]
    """The values for the config, `key.sub=value`."""

    @property
    def values(self) -> dict[str, str]:
        """The overrides' values by key."""
        return dict(map(split_override, self.overrides))

    @property
    def is_paced(self) -> bool:
        """Whether training is fitted to the time, as the number of epochs is not given."""
        return "train.epochs" not in self.values

    @property
    def training_minutes(self) -> float:
        """The minutes of the time that are for training."""
        return 60 * self.hours * TRAINING_SHARE


def make_free_folder(path: Path) -> Path:
    """Make the folder to write into, with a number after its name if a folder with contents is in the way.

    Raises:
        ConfigError: it cannot be made.
    """
    candidates = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    with writing_into(path):
        folder = next(candidate for candidate in candidates if is_free(candidate))
        folder.mkdir(parents=True, exist_ok=True)
        declare_output(folder)
    return folder


def is_free(folder: Path) -> bool:
    """Whether a path does not exist, or is an empty folder, such as a failed earlier start leaves behind."""
    return not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {OUTPUT_LIST})


def comment(text: str) -> str:
    """Return a one-line comment; characters that could end the line are written as escape sequences."""
    return "# " + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def derive_config(
    base: str, about: Sequence[str], lines: Sequence[str], overrides: Sequence[str], note: str = ""
) -> str:
    """Return the text of a config that changes `vitkit.configs.BASE` by lines about `cfg`, and at last by overrides.

    Args:
        about: the comments at its beginning.
        note: added to the comment on the overrides.
    """
    imports = f"from vitkit.configs.{base} import config as base"
    if overrides:
        imports = f"from vitkit.config import with_overrides\n{imports}"
        lines = [*lines, f"# from the command line{note}", f"cfg = with_overrides(cfg, {overrides!r})"]
    body = textwrap.indent("\n".join([*lines, "return cfg"]), "    ")
    return "\n".join([*map(comment, about), "", imports, "", "", "def config():", body, ""])


def time_settings(
    folder: Path, text: str, request: TimedRequest, device: str, *, epoch_minutes: float = math.inf
) -> StepCost:
    """Time a few steps of the config in a folder, see `time_steps`, and print what one takes; `text` says of what."""
    # The epochs again, as an override may set fewer than there are steps to time.
    command = ["vitkit", "train", str(folder / CONFIG), "train.epochs=1000", "--device", device]
    shortest = min(60 * request.hours * TIMING_SHARE, LONGEST_TIMING)
    cost = time_steps(command, folder / "timing", minutes=shortest, epoch_minutes=epoch_minutes)
    (folder / "timing.txt").unlink(missing_ok=True)
    note = note_if_busy(cost.minutes, cost.processor_minutes) if device == "cpu" else ""
    print(f"timed     {text}: {60 * cost.minutes:.2f} s a step{'; it ' * bool(note)}{note}", flush=True)
    return cost


def train_in_time(
    config: Path,
    replan: Callable[[int, float], None],
    epochs: int,
    cost: StepCost,
    *,
    request: TimedRequest,
    deadline: float,
    relative_cost: Callable[[float], float] = lambda share: 1.0,
    hooks: Sequence[Hook] = (),
    **how: Any,
) -> Run:
    """Train until a time, with pauses in which the epochs are fitted to what a step takes.

    Args:
        config: the config's file.
        replan: takes the number of epochs and the minutes of a step, and writes the config with them.
        epochs, cost: of what is planned.
        deadline: when everything has to end, on the monotonic clock.
        relative_cost: what a step costs after a share of the run, in parts of the mean.
        hooks, how: the arguments of `vitkit.train`, with `resume` for a run that goes on.
    """

    def plan(epochs: int, minutes: float) -> dict[str, int]:
        print(f"paced     {60 * minutes:.2f} s a step: {pluralize(epochs, 'epochs')} in all", flush=True)
        replan(epochs, minutes)
        return {key: load_config(config)["train"][key] for key in ("epochs", "eval_every")}

    # Reading the images and timing the steps may have taken long.
    minutes_left = (deadline - time.monotonic()) / 60 * TRAINING_SHARE
    if "resume" not in how:
        if request.is_paced and epochs * cost.steps_per_epoch * cost.minutes > TOO_SLOW * minutes_left:
            plan(max(1, int(minutes_left / cost.minutes / cost.steps_per_epoch)), cost.minutes)
        how["config"] = load_config(config)
    if not request.is_paced:
        return api.train(**how, hooks=hooks)
    pace = Pace(deadline, 3600 * request.hours, relative_cost=relative_cost)
    while True:
        run = api.train(**how, hooks=[pace, *hooks])
        if pace.epochs is None:
            return run
        how = dict(resume=run.path, train=plan(pace.epochs, pace.step_seconds / 60), device=how["device"])
        evaluation = pace.evaluation_seconds
        pace = Pace(deadline, pace.seconds, evaluation_seconds=evaluation, relative_cost=relative_cost)


def note_if_busy(minutes: float, processor_minutes: float) -> str:
    """Return a note if a process got little of a core in some time; else ""."""
    share = processor_minutes / minutes if minutes > 0 else 1.0
    return (
        "" if share >= BUSY_BELOW else f"gets {share:.1g} of a core, as other programs are busy: end them, if you can"
    )


class Pace(Hook):
    """Ends a run in time, after the epoch in which its plan turns out wrong, or in the middle of one at the deadline.

    Args:
        deadline: time on the monotonic clock by which everything is to be over, in seconds.
        seconds: the time from the beginning to the deadline.
        evaluation_seconds: what an evaluation takes; None: not known yet.
        relative_cost: see `train_in_time`.

    Attributes:
        epochs: the number of epochs for which there is time, if the run is to be planned again; None: it was right.
        step_seconds: what a step takes on average over the run.
    """

    def __init__(
        self,
        deadline: float,
        seconds: float,
        *,
        evaluation_seconds: float | None = None,
        relative_cost: Callable[[float], float] = lambda share: 1.0,
    ):
        self.deadline, self.seconds, self.evaluation_seconds = deadline, seconds, evaluation_seconds
        self.relative_cost = relative_cost
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
        self._steps += self.relative_cost((run.progress.epoch + 0.5) / run.settings.epochs)
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
        """Compare the time that the remaining epochs will take with the time that is left."""
        done = run.progress.epoch + 1
        left = run.settings.epochs - done
        if self._is_over or left == 0:
            return
        evaluations = left // run.settings.eval_every
        available = self._end_of_training() - time.monotonic() - evaluations * self._evaluation_seconds()
        epoch_seconds = self.step_seconds * run.progress.num_steps

        def seconds(number: int) -> float:
            """Return how many seconds as many more epochs take, if the run ends with them."""
            shares = ((done + k + 0.5) / (done + number) for k in range(number))
            return epoch_seconds * sum(map(self.relative_cost, shares))

        expected = seconds(left)
        if available < 0.5 * epoch_seconds:
            self._is_over = True
            print_line(f"ending with epoch {done}, as there is no time for another one")
        elif expected > TOO_SLOW * available or available - expected > max(
            MUCH_LEFT * available, SHARE_BETWEEN_PLANS * self.seconds
        ):
            more = range(1, 1 + int(2 * available / epoch_seconds))  # the cheapest take over half of the mean
            epochs = done + max(1, bisect.bisect_right(more, available, key=seconds))
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
        """Whether the time is over, or the run has to be planned again."""
        return self._is_over or self.epochs is not None
