"""The parts that a training run is made of, shared by the trainer, its steps and all hooks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vitkit.devices import autocast, resolve_precision
from vitkit.engine.averaging import MovingAverage
from vitkit.engine.checkpointing import Progress, RunCheckpoints
from vitkit.engine.parallel import wrap
from vitkit.engine.settings import TrainSettings
from vitkit.engine.step import StepGuard
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Loader
from vitkit.protocols.evaluator import LOWER_IS_BETTER


@dataclass(kw_only=True)
class TrainRun:
    """The parts of a run; the results of a single step are a `Step`."""

    model: Any
    """The `Model` on `device`, already sharded if `settings.strategy` says so."""
    criterion: Criterion
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
    lower_is_better: Collection[str] = LOWER_IS_BETTER
    """The metrics of which a lower value is better, those of the evaluator too."""
    val_data: str = ""
    """Number and checksum of the validation samples."""
    owns_folder: Callable[[], bool] = lambda: True
    """Whether the folder still belongs to this run, see `run_folder`."""

    model_to_average: nn.Module | None = None
    """A copy of a sharded model, sharded alike, for the moving average; None: the model is copied."""

    hooks: Sequence[Any] = field(default=(), init=False)
    """Each a `vitkit.engine.hooks.Hook`, in the order in which they are called."""
    progress: Progress = field(default_factory=Progress, init=False)

    def __post_init__(self) -> None:
        precision = resolve_precision(self.settings.precision, self.device)
        self.settings = replace(self.settings, precision=precision)
        self.autocast = autocast(self.device, precision)
        self.ema: MovingAverage | None = None
        if (decay := self.settings.ema_decay) is not None:
            self.ema = MovingAverage(
                self.model, decay=decay, ramp_steps=self.settings.ema_ramp_steps, module=self.model_to_average
            )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.meters = self.criterion.meters
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
        minutes = self.settings.save_every_minutes
        self.guard = StepGuard(self.model, self.scaler, self.checkpoints, save_every_minutes=minutes)
