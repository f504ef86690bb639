"""Reports what `train.compile=true` is compiling, and for how long."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from vitkit.engine.run import Hook, TrainRun
from vitkit.logging import say

_SECONDS = 20.0
"""Seconds between two lines about a step that is still running."""


class CompileLog(Hook):
    """Logs what torch.compile compiles, how long it has been running, and when the first step is done.

    torch.compile works within the first step, for minutes on a CPU, and again in a later step whose images have another
    size; it reports nothing itself.

    Args:
        every: seconds between lines.
    """

    def __init__(self, *, every: float = _SECONDS):
        self.every = every
        self._began: float | None = None
        self._has_stepped = False

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Report what is compiled, and watch the steps from a thread."""
        num_parameters = sum(parameter.numel() for parameter in run.parameters) / 1e6
        self._what = f"{type(run.model).__name__} ({num_parameters:.1f} M parameters)"
        say(f"train.compile: the first step compiles {self._what} for {run.device.type}, which can take minutes")
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(run, ended), daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()

    def before_epoch(self, run: TrainRun) -> None:
        """Start measuring a step's time."""
        self._began = time.monotonic()

    def after_step(self, run: TrainRun) -> None:
        """Report how long the first step took, and start measuring the next one's time."""
        if not self._has_stepped:
            say(f"train.compile: the first step took {time.monotonic() - self._began:.0f} s")
            self._has_stepped = True
        self._began = time.monotonic()

    def after_epoch(self, run: TrainRun) -> None:
        """Stop measuring, as evaluations use the model without compilation."""
        self._began = None

    def _watch(self, run: TrainRun, ended: threading.Event) -> None:
        while not ended.wait(self.every):
            began = self._began
            seconds = 0.0 if began is None else time.monotonic() - began
            if seconds >= self.every:
                step = run.progress.step + 1
                why = "" if step == 1 or not self._has_stepped else ", probably for images of another size"
                say(f"train.compile: step {step} has taken {seconds:.0f} s so far; {self._what} is compiled{why}")
