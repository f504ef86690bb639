"""A training run: what is trained and with what, how far it is, and the hooks that take part in it.

Hooks and the loop talk through the run's flags:

| flag        | written by                                      | read by                                              |
| ----------- | ----------------------------------------------- | ---------------------------------------------------- |
| should_step | StepGuard, before a step                        | train_step, and hooks after a step                   |
| should_save | hooks before a step; save clears it             | StepGuard (makes it all ranks'), Saving after a step |
| should_stop | Signals, before a step                          | StepGuard (as above), Saving, Signals after a step   |
| should_end  | BestMetric, after an evaluation, or restored    | train, before and after an epoch                     |
| is_best     | BestMetric, after an evaluation; save clears it | TrainRun.save                                        |
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitkit.distributed import broadcast_object
from vitkit.engine.checkpoints import BEST_NAME, Progress, RunCheckpoints
from vitkit.engine.parallel import wrap
from vitkit.engine.settings import TrainSettings
from vitkit.protocols import HasMeters, Loader
from vitkit.structures import Batch


class Hook:
    """What takes part in a run beside the steps themselves: every method is called on all ranks, unless it says not.

    A subclass overrides the methods it needs. Those that return a context span a part of the run: write them as
    generators with `@contextmanager`, with a `yield` where that part takes place.
    """

    def during_training(self, run: "TrainRun") -> AbstractContextManager:
        """Span the training. It is entered once the run is restored; an error that ends the run passes through it."""
        return nullcontext()

    def before_epoch(self, run: "TrainRun") -> None:
        """Prepare for the first batch of an epoch, or of what is left of it."""

    def before_step(self, run: "TrainRun") -> None:
        """Look at the gradients of `run.model`, which are complete and have the norm `run.grad_norm`."""

    def after_step(self, run: "TrainRun") -> None:
        """Look at a step that is done, or was skipped if `run.should_step` is False."""

    def on_log(self, run: "TrainRun", record: Mapping[str, Any]) -> None:
        """Take a record of log.jsonl; called on the main process alone.

        Args:
            record: `kind` is "train", with step, epoch, loss, losses (by name), lr, it_s, data_share and memory_mb; or
                "val", with step, epoch and metrics (by name). Both have minutes and processor_minutes of training, up
                to there.
        """

    def after_epoch(self, run: "TrainRun") -> None:
        """Look at an epoch whose batches are done; its evaluation comes next."""

    def during_evaluation(self, run: "TrainRun") -> AbstractContextManager:
        """Span an evaluation."""
        return nullcontext()

    def after_evaluation(self, run: "TrainRun", metrics: Mapping[str, float]) -> None:
        """Look at the evaluator's metrics; those of the training batches are there as train_NAME."""


@dataclass(kw_only=True)
class TrainRun:
    """What the loop, each step and all hooks work on."""

    model: nn.Module
    """On `device`, and sharded already where `settings.strategy` says so."""
    criterion: nn.Module
    loader: Loader
    optimizer: Optimizer
    schedule: LRScheduler
    settings: TrainSettings
    device: torch.device
    run_dir: Path
    saved_with: Mapping[str, Any] = field(default_factory=dict)
    """Plain values that every checkpoint holds (config, classes)."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Plain values that evaluations find and every checkpoint holds from then on (score thresholds, image sizes)."""
    owns_folder: Callable[[], bool] = lambda: True
    """Whether the folder still is this run's, see `run_folder`."""

    hooks: Sequence[Hook] = field(default=(), init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    data_seconds: float = field(default=0.0, init=False)
    """Time spent waiting for batches."""
    is_best: bool = field(default=False, init=False)
    """Whether the epoch's evaluation is the best so far, and not saved yet."""
    best_before: float = field(default=-math.inf, init=False)
    """The best metric before the last evaluation."""

    batch: Batch | None = field(default=None, init=False)
    """The batch under way; None between steps."""
    targets: list[Sequence[Mapping[str, Any]]] = field(default_factory=list, init=False)
    """Targets of each batch of the step."""
    losses: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    """Detached losses of each batch of the step."""
    grad_norm: Tensor | None = field(default=None, init=False)
    """The norm of all gradients together, without the loss scale and before clipping."""

    should_step: bool = field(default=True, init=False)
    """Whether the step under way is taken; all ranks decide together, see `StepGuard`."""
    should_save: bool = field(default=False, init=False)
    """Whether to save after this step. One rank that asks before the step is enough."""
    should_stop: bool = field(default=False, init=False)
    """Whether to save and end the run after this step, to be resumed later. One rank is enough, as above."""
    should_end: bool = field(default=False, init=False)
    """Whether the run is complete, though epochs are left."""

    def __post_init__(self) -> None:
        self.ema: AveragedModel | None = None
        if self.settings.ema_decay is not None:
            average = get_ema_multi_avg_fn(self.settings.ema_decay)
            self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.meters = self.criterion.meters if isinstance(self.criterion, HasMeters) else {}
        # Looking for them in every module can take as long as a step's norm of gradients.
        self.parameters = list(self.model.parameters())
        self.wrapped_model = wrap(self.model, self.settings, self.device)
        self.checkpoints = RunCheckpoints(
            self.run_dir,
            {
                "model": self.model,
                "ema": self.ema,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
                "scaler": self.scaler,
            },
            meters=self.meters,
            saved_with=self.saved_with,
            measured=self.measured,
            keep=self.settings.keep_checkpoints,
            device=self.device,
            sharded=self.settings.sharded_checkpoints,
            owns_folder=self.owns_folder,
        )
        self.saved_at = time.monotonic()

    def save(self, *, raise_on_error: bool = False) -> None:
        """Save the state between two steps; all ranks call it.

        Raises:
            CheckpointError: it cannot be written, and `raise_on_error`; otherwise that is logged and training
                continues. Or the folder is not this run's any more.
        """
        written = self.checkpoints.save(self.progress, is_best=self.is_best, raise_on_error=raise_on_error)
        if self.is_best and not broadcast_object(BEST_NAME in written):
            # These weights will have changed by the next save. A later evaluation is compared with what best.pth holds.
            self.progress.best = self.best_before
        self.saved_at = time.monotonic()
        self.should_save = self.is_best = False
