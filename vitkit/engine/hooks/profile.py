"""Profiles the parts of a training step."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from vitkit.devices import synchronize
from vitkit.engine.run import TrainRun
from vitkit.engine.step import Step
from vitkit.errors import ConfigError
from vitkit.logging import print_line
from vitkit.protocols.learning import Hook
from vitkit.registry import HOOKS

PARTS = ("data", "forward", "loss", "backward", "optimizer", "other")


@HOOKS.register
class StepProfile(Hook):
    """Prints once how long a step takes, and its parts: waiting for data, the forward pass, the loss with its matching,
    the backward pass with the gradients' norm, and the optimizer.

    While it measures, the device is waited for after each part, so that a GPU's steps take a little longer.

    Args:
        steps: number of steps to average over.
        after: number of steps before the first that is measured; they warm up caches and kernels.
    Raises:
        ConfigError: there are no steps.
    """

    def __init__(self, *, steps: int = 20, after: int = 5):
        if steps < 1 or after < 1:
            raise ConfigError(f"StepProfile: steps={steps}, after={after}: expected at least 1.")
        self.steps, self.after = steps, after
        self.seconds = dict.fromkeys(PARTS, 0.0)
        """Seconds of each part in the measured steps so far."""
        self._seen, self._mark, self._batches = 0, 0.0, 0
        self._device = torch.device("cpu")
        self._of_step = dict.fromkeys(PARTS, 0.0)
        self._handles: list[Any] = []

    @contextmanager
    def during_training(self, run: TrainRun) -> Iterator[None]:
        """Register at the model, the criterion and the optimizer."""
        self._device = run.device
        registrations = (
            (run.model.register_forward_pre_hook, "backward"),  # of the batch before, if gradients are accumulated
            (run.model.register_forward_hook, "forward"),
            (run.criterion.register_forward_pre_hook, "other"),
            (run.criterion.register_forward_hook, "loss"),
            (run.optimizer.register_step_pre_hook, "backward"),
            (run.optimizer.register_step_post_hook, "optimizer"),
        )
        with ExitStack() as stack:
            for register, part in registrations:
                self._handles.append(register(lambda *_, part=part: self._end(part)))
                stack.callback(self._handles[-1].remove)
            yield

    def before_epoch(self, run: TrainRun) -> None:
        """Start the clock again after an evaluation."""
        self._start()

    def after_step(self, run: TrainRun, step: Step) -> None:
        """Add a step that was taken, and print the result after the last one."""
        if self._seen >= self.after + self.steps:
            return
        self._end("other")
        if step.decision.take:
            self._seen += 1
            if self._seen > self.after:
                self._add(step.data_seconds)
            if self._seen == self.after + self.steps:
                print_line(str(self))
                for handle in self._handles:
                    handle.remove()
        self._start()

    def _start(self) -> None:
        self._of_step, self._batches = dict.fromkeys(PARTS, 0.0), 0
        synchronize(self._device)
        self._mark = time.perf_counter()

    def _end(self, part: str) -> None:
        """Count the time since the last end for a part."""
        synchronize(self._device)
        now = time.perf_counter()
        if part == "forward":
            self._batches += 1
        # Before the first forward pass there is no backward pass, only the waiting.
        name = "data" if part == "backward" and not self._batches else part
        self._of_step[name] += now - self._mark
        self._mark = now

    def _add(self, data_seconds: float) -> None:
        """Add the parts of a step, of which the waiting for later batches was counted as their backward passes."""
        parts, waiting = self._of_step, self._of_step["data"]
        parts["data"] = data_seconds
        parts["other"] += max(waiting - data_seconds / self._batches, 0.0)
        parts["backward"] -= data_seconds * (1 - 1 / self._batches)
        for name, seconds in parts.items():
            self.seconds[name] += seconds

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        parts = (
            f"{name} {seconds / self.steps:.4f} s ({seconds / total:.0%})" for name, seconds in self.seconds.items()
        )
        return f"a step takes {total / self.steps:.4f} s (mean of {self.steps}): {', '.join(parts)}"
