"""A training run: its model and settings, its progress, and the hooks that take part in it."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitkit.devices import autocast, resolve_precision
from vitkit.engine.averaging import MovingAverage
from vitkit.engine.checkpointing import Progress, RunCheckpoints
from vitkit.engine.parallel import wrap
from vitkit.engine.settings import TrainSettings
from vitkit.engine.step import Decision, StepGuard
from vitkit.protocols import Loader
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

    def after_step(self, run: "TrainRun", decision: Decision) -> None:
        """Called after a step that was taken or, if `decision.step` is False, skipped."""

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

    def should_end(self, run: "TrainRun") -> bool:
        """Return whether the run is complete although epochs are left; asked before each epoch and after its
        evaluation. All ranks must agree."""
        return False


@dataclass(kw_only=True)
class TrainRun:
    """The state that the trainer, each step and all hooks work on."""

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
    guard: StepGuard = field(default_factory=StepGuard, init=False)
    progress: Progress = field(default_factory=Progress, init=False)
    lr: float = field(default=0.0, init=False)
    """Largest learning rate of the step's parameter groups."""
    data_seconds: float = field(default=0.0, init=False)
    """Time spent waiting for batches, in seconds."""
    stop_signal: signal.Signals | None = field(default=None, init=False)
    """The signal that asked this process to end the run after the current step; None without one."""

    batch: Batch | None = field(default=None, init=False)
    """The current batch; None between steps."""
    targets: list[Sequence[Mapping[str, Any]]] = field(default_factory=list, init=False)
    """Targets of each batch of the step."""
    losses: list[dict[str, Tensor]] = field(default_factory=list, init=False)
    """Detached losses of each batch of the step."""
    grad_norm: Tensor | None = field(default=None, init=False)
    """Norm over all gradients, without the loss scale and before clipping."""

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, precision=resolve_precision(self.settings.precision, self.device))
        self.autocast = autocast(self.device, self.settings.precision)
        self.ema: MovingAverage | None = None
        if (decay := self.settings.ema_decay) is not None:
            self.ema = MovingAverage(self.model, decay=decay, ramp_steps=self.settings.ema_ramp_steps)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.meters = getattr(self.criterion, "meters", {})  # optional, see `Criterion`
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

    def is_save_due(self) -> bool:
        """Return whether `save_every_minutes` have passed by this rank's clock, which may differ from other ranks'."""
        minutes = self.settings.save_every_minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def save(self, *, is_best: bool = False, raise_on_error: bool = False) -> set[str]:
        """Save the state between two steps; all ranks must call it. See `RunCheckpoints.save`."""
        written = self.checkpoints.save(self.progress, is_best=is_best, raise_on_error=raise_on_error)
        self.saved_at = time.monotonic()
        return written
