"""Run `vitkit train` in separate processes, and measure the cost of its steps."""

import ctypes
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitkit.errors import DataError, TrainingError

_WARM_UP, _TIMED_STEPS = 5, 10
"""The number of steps before those that are timed, and of those that are timed at least."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class StepCost:
    """The cost of a training step."""

    minutes: float
    processor_minutes: float
    steps_per_epoch: float


def time_steps(
    command: Sequence[str], folder: Path, *, minutes: float = 0.0, epoch_minutes: float = math.inf
) -> StepCost:
    """Train a few steps, and return the cost of one; the run's folder is removed afterwards.

    Args:
        command: begins with "vitkit", "train"; without --run-dir.
        folder: the run's folder.
        minutes: the least time over which steps are timed, as other programs slow down some of them.
        epoch_minutes: the most time that an epoch may take: once it is seen to take longer, no more steps are timed.
    Raises:
        TrainingError: the run failed, or ended before enough steps were timed.
    """
    from vitkit.apps.visualization.curves import read_log
    from vitkit.logging import LOG_NAME

    shutil.rmtree(folder, ignore_errors=True)
    output = folder.with_suffix(".txt")
    records: list[dict[str, Any]] = []
    cost, is_enough, deadline = None, False, time.monotonic() + 60 * epoch_minutes
    with Child([*command, "train.log_every=1", "--run-dir", str(folder)], output) as child:
        while child.process.poll() is None and not is_enough and time.monotonic() < deadline:
            time.sleep(0.5)
            with suppress(DataError):  # nothing is logged yet
                records = read_log(folder / LOG_NAME)[0]
            is_warm = len(records) > _WARM_UP + _TIMED_STEPS
            if len(records) > 2:
                cost = _cost_of(records[_WARM_UP if is_warm else 0 :])
                is_enough = (is_warm and records[-1]["minutes"] - records[_WARM_UP]["minutes"] >= minutes) or (
                    cost.minutes * cost.steps_per_epoch > epoch_minutes
                )
        if not is_enough:
            child.finish_if_ended()
            limit = "" if math.isinf(epoch_minutes) else f" in {60 * epoch_minutes:.0f} s"
            raise TrainingError(f"{len(records)} steps{limit} are too few to time them ({output}). Give more time.")
    shutil.rmtree(folder)
    return cost


def _cost_of(records: Sequence[dict[str, Any]]) -> StepCost:
    first, *_, last = records
    steps = last["step"] - first["step"]
    minutes, processor_minutes = ((last[key] - first[key]) / steps for key in ("minutes", "processor_minutes"))
    return StepCost(minutes, processor_minutes, last["step"] / last["epoch"])


class Child:
    """A tool in a separate process, to which ctrl-C and SIGTERM are passed on.

    Args:
        command: begins with "vitkit".
        output: the file for the tool's output.
        advice: text after the word "interrupted" when a signal has ended the tool.
    """

    def __init__(self, command: list[str], output: Path, advice: str = ""):
        self.output, self.advice = output, advice
        output.parent.mkdir(parents=True, exist_ok=True)
        # The file, as `python -m` would look for vitkit in the working directory, which may contain a clone.
        module = [sys.executable, find_spec(f"vitkit.tools.{command[1]}").origin, *command[2:]]
        with output.open("a", encoding="utf-8") as file:
            # In a new process session ctrl-C reaches the tool only once, through `_forward`.
            before = _end_with_parent if sys.platform == "linux" else None
            self.process = subprocess.Popen(module, stdout=file, stderr=file, start_new_session=True, preexec_fn=before)

    def __enter__(self) -> "Child":
        self._before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}
        self._signaled = False
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._signaled:
            sys.exit(f"interrupted{self.advice} ({self.output})")

    def _forward(self, number: int, _: object) -> None:
        self._signaled = True
        self.process.send_signal(number)

    def finish_if_ended(self) -> None:
        """Raise like `finish` if the tool has ended."""
        if self.process.poll() is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until the tool has ended.

        Raises:
            TrainingError: the tool failed.
        """
        if self.process.wait() != 0 and not self._signaled:
            raise TrainingError(f"{last_error(self.output.read_text(encoding='utf-8'))} ({self.output})")


def last_error(output: str) -> str:
    """Return the first line of the last error in a tool's output, as details may follow; without one the last line."""
    lines = output.strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["failed"])[-1]


def _end_with_parent() -> None:
    """Let Linux send SIGTERM to this process if its parent is killed, as nothing else would end it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run_to_end(command: list[str], folder: Path) -> None:
    """Run a command to its end; raises like `Child.finish`."""
    with Child(command, folder.with_suffix(".txt"), "; the same command resumes it") as child:
        child.finish()
