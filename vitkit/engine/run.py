"""A training run: its model and settings, its progress, and the hooks that take part in it.

Hooks and the loop communicate through the run's flags:

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
    """Base of objects that take part in a run besides the steps; methods are called on all ranks unless stated
    otherwise.

    A subclass overrides the methods it needs. Those that return a context enclose a part of the run: write them as
    generators with `@contextmanager` that `yield` at the point where that part runs.
    """

    def during_training(self, run: "TrainRun") -> AbstractContextManager:
        """Enclose the training, entered after the run is restored; an error that ends the run passes through it."""
        return nullcontext()

    def before_epoch(self, run: "TrainRun") -> None:
        """Prepare for the first batch of an epoch, or of the rest of it after resuming."""

    def before_step(self, run: "TrainRun") -> None:
        """Called when the gradients of `run.model` are complete; their norm is `run.grad_norm`."""

    def after_step(self, run: "TrainRun") -> None:
        """Called after a step that was taken or, if `run.should_step` is False, skipped."""

    def on_log(self, run: "TrainRun", record: Mapping[str, Any]) -> None:
        """Handle a record of log.jsonl; only called on the main process.

        Args:
            record: `kind` is "train", with step, epoch, loss, losses (by name), lr, it_s, data_share and memory_mb; or
                "val", with step, epoch and metrics (by name). Both have minutes and processor_minutes, the training
                time so far.
        """

    def after_epoch(self, run: "TrainRun") -> None:
        """Called after an epoch's batches, before its evaluation."""

    def during_evaluation(self, run: "TrainRun") -> AbstractContextManager:
        """Enclose an evaluation."""
        return nullcontext()

    def after_evaluation(self, run: "TrainRun", metrics: Mapping[str, float]) -> None:
        """Called with the evaluator's metrics; metrics of the training batches are included as train_NAME."""


@dataclass(kw_only=True)
class TrainRun:
    """The state that the loop, each step and all hooks work on."""

    model: nn.Module
    """The model on `device`, already sharded if `settings.strategy` says so."""
    criterion: nn.Module
    loader: Loader
    optimizer: Optimizer
    schedule: LRScheduler
    settings: TrainSettings
    device: torch.device
    run_dir: Path
    saved_with: Mapping[str, Any] = field(default_factory=dict)
    """Plain values to store in every checkpoint (config, classes)."""
    measured: dict[str, Any] = field(default_factory=dict)
    """Plain values that evaluations determine, stored in every later checkpoint (score thresholds, image sizes)."""
    owns_folder: Callable[[], bool] = lambda: True
    """Whether the folder still belongs to this run, see `run_folder`."""

    hooks: Sequence[Hook] = field(default=(), init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    data_seconds: float = field(default=0.0, init=False)
    """Time spent waiting for batches, in seconds."""
    is_best: bool = field(default=False, init=False)
    """Whether the epoch's evaluation is the best so far and not saved yet."""
    best_before: float = field(default=-math.inf, init=False)
    """The best metric before the last evaluation."""

    batch: Batch | None = field(default=None, init=False)
    """The current batch; None between steps."""
    targets: list[Sequence[Mapping[str, Any]]] = field(default_factory=list, init=False)
    """Targets of each batch of the step."""
    losses: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    """Detached losses of each batch of the step."""
    grad_norm: Tensor | None = field(default=None, init=False)
    """Norm over all gradients, without the loss scale and before clipping."""

    should_step: bool = field(default=True, init=False)
    """Whether the current step is taken; all ranks decide together, see `StepGuard`."""
    should_save: bool = field(default=False, init=False)
    """Whether to save after this step. It is enough that one rank requests it before the step."""
    should_stop: bool = field(default=False, init=False)
    """Whether to save and end the run after this step, to be resumed later. One rank's request is enough."""
    should_end: bool = field(default=False, init=False)
    """Whether the run is complete although epochs are left."""

    def __post_init__(self) -> None:
        self.ema: AveragedModel | None = None
        if self.settings.ema_decay is not None:
            average = get_ema_multi_avg_fn(self.settings.ema_decay)
            self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.meters = self.criterion.meters if isinstance(self.criterion, HasMeters) else {}
        # Collecting them from all modules can take as long as a step's norm of gradients.
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
        """Save the state between two steps; all ranks must call it.

        Raises:
            CheckpointError: the state cannot be written and `raise_on_error` is set (otherwise this is logged and
                training continues), or the folder no longer belongs to this run.
        """
        written = self.checkpoints.save(self.progress, is_best=self.is_best, raise_on_error=raise_on_error)
        if self.is_best and not broadcast_object(BEST_NAME in written):
            # These weights will have changed by the next save. Later evaluations are compared with the one in best.pth.
            self.progress.best = self.best_before
        self.saved_at = time.monotonic()
        self.should_save = self.is_best = False
