"""The `train` section of a config."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vitkit.config.load import Config, value_at
from vitkit.data.loading.settings import DataSettings
from vitkit.devices import has_bfloat16
from vitkit.errors import ConfigError
from vitkit.nn.lora import LoRA, LoRAOptions
from vitkit.registry import SECTIONS, Spec
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")


@SECTIONS.register(name="train")
@dataclass(kw_only=True)
class TrainSettings:
    """Settings of training, for all tasks."""

    epochs: int
    seed: int = 42
    clip_grad_norm: float | None = None
    """Maximum norm over all gradients, to which they are clipped; None: no clipping."""
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    """Under "bf16" and "fp16", autocast chooses per operation; "fp16" also scales the loss. "auto": bf16 on a device
    with instructions for it, otherwise fp32; a run keeps what it was started with."""
    accumulate: int = 1
    """Number of batches whose gradients are averaged before each optimizer step; a criterion that divides by the number
    of objects still does so per batch."""
    images_per_step: int | None = None
    """Number of images of an optimizer step over all processes. `accumulate` then follows: images_per_step /
    (processes * data.images_per_gpu). Steps, batches, schedule and random numbers are the same for any number of
    processes, and a criterion divides by the number of objects of the step."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, evaluated and exported instead; None: no average."""
    ema_ramp_steps: float = 0.0
    """The decay of the average's n-th update is ema_decay * (1 - exp(-n / ema_ramp_steps)), so that it soon forgets the
    first weights; 0: it is constant."""
    restart_epoch: int | None = None
    """Before this epoch, counted from 0, return to the best weights so far and begin a new average of them, as D-FINE
    does where strong augmentation ends; None: never."""
    restart_ema_decay: float | None = None
    """`ema_decay` from then on; None: the same."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: uses less memory, and about a third more time."""
    compile: bool = False
    """Use torch.compile on the model: the first step takes minutes, and so does the second size of images, whose result
    then serves all other sizes. On an H100 a step of DETR-R50 takes 0.7 of the time, one of RT-DETR-R18 0.9."""
    channels_last: bool = False
    """Store convolution weights in channels-last layout (faster with bf16 on GPUs). With "fsdp" they keep theirs, as
    torch shards no other; backbones lay out the images so in any case."""
    sync_batch_norm: bool = False
    """Compute the statistics of batch norms over the batches of all ranks, where they are not frozen; GPUs only."""
    reference_batch_size: int | None = None
    """Images per optimizer step for which `optimizer.lr` is meant; a run with a different number warns."""
    log_every: int = 50
    """Steps between records of the log; the console also gets a line after the first step, and every 20 seconds."""
    eval_every: int = 1
    """Epochs between evaluations (the last epoch is always evaluated)."""
    best_metric: str | None = "bbox/AP"
    """The metric that selects the best checkpoint: the highest value, or the lowest of loss, nll, perplexity and the
    evaluator's `lower_is_better`; None: there is no best.pth, and last.pth is used."""
    patience: int | None = None
    """Stop after this many consecutive evaluations without a better `best_metric`."""
    save_every_minutes: float | None = 15.0
    """Also save within epochs when this much time has passed; None: only after epochs."""
    save_every_steps: int | None = None
    """Also save within epochs each time that this many steps are done."""
    keep_checkpoints: int = 0
    """Number of the newest checkpoints to keep under separate names, besides the last and the best."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """"ddp": every GPU holds the full model; "fsdp": weights, gradients and the optimizer's state are sharded over the
    GPUs, for models that do not fit on one."""
    sharded_checkpoints: bool = False
    """With "fsdp": each GPU writes its shards, into a folder that the checkpoint refers to, so that no process holds
    the full model; any number of GPUs can resume from such a checkpoint, and all tools read it."""
    lora: LoRAOptions | None = None
    """Train updates of low rank in place of the layers' weights, see `vitkit.nn.lora.LoRA`; None: train the weights."""
    hooks: Sequence[Spec] = ()
    """Additional hooks of the run, see `vitkit.engine.hooks.Hook`."""

    def __post_init__(self) -> None:
        minima = dict(epochs=1, accumulate=1, log_every=1, eval_every=1, keep_checkpoints=0, ema_ramp_steps=0)
        for name, least in minima.items():
            if getattr(self, name) < least:
                raise ConfigError(f"train.{name}: got {getattr(self, name)}; expected at least {least}.")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ConfigError(f"train.clip_grad_norm: got {self.clip_grad_norm}; expected a value above 0, or none.")
        minima = dict(images_per_step=1, save_every_steps=1, patience=1, reference_batch_size=1, save_every_minutes=0)
        for name, least in minima.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"train.{name}: got {value}; expected at least {least}, or none.")
        if self.patience is not None and self.best_metric is None:
            raise ConfigError("train.patience: counts evaluations without a better metric. Set train.best_metric.")
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ConfigError(
                "train.precision=fp16: with train.strategy=fsdp each rank would see only the overflows of its own "
                "shards, and ranks would choose different loss scales. Use train.precision=bf16."
            )
        if self.sharded_checkpoints and self.strategy != "fsdp":
            raise ConfigError("train.sharded_checkpoints: only train.strategy=fsdp has shards to write.")
        if self.lora is not None:
            LoRA(**self.lora)
            if self.strategy == "fsdp":
                raise ConfigError(
                    "train.lora: the layers of a sharded model cannot be updated. Use train.strategy=ddp: frozen "
                    "weights have no gradients and no optimizer state, so they need little memory."
                )
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"train.seed: got {self.seed}; expected 0 to 2^32 - 1.")
        for name in ("ema_decay", "restart_ema_decay"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"train.{name}: got {value}; expected 0 to 1, for example 0.9998.")
        self._check_restart()

    def _check_restart(self) -> None:
        if self.restart_epoch is None:
            return
        if self.best_metric is None:
            raise ConfigError("train.restart_epoch: returns to the best weights. Set train.best_metric.")
        if self.ema_decay is None:
            raise ConfigError("train.restart_epoch: begins a new average, and there is none. Set train.ema_decay.")
        if self.restart_epoch < self.eval_every:
            raise ConfigError(
                f"train.restart_epoch: got {self.restart_epoch}; expected at least train.eval_every={self.eval_every}: "
                "without an evaluation there are no best weights to return to."
            )

    def for_processes(self, data: DataSettings, processes: int) -> "TrainSettings":
        """Return the settings with the `accumulate` that makes up `images_per_step`, if that is set.

        Raises:
            ConfigError: the processes cannot share the images evenly, the data is text, or `accumulate` is also set.
        """
        images, per_batch = self.images_per_step, data.images_per_gpu
        if images is None:
            return self
        if data.tokens_per_gpu is not None:
            raise ConfigError(
                f"train.images_per_step={images}: batches of data.tokens_per_gpu have no fixed number of sentences. "
                "Set train.accumulate."
            )
        if self.accumulate > 1:
            raise ConfigError(
                f"train.images_per_step={images} and train.accumulate={self.accumulate}: the second follows from the "
                "first. Set only one of them."
            )
        unit = per_batch * processes
        if images % unit:
            raise ConfigError(
                f"train.images_per_step={images}: {pluralize(processes, 'processes')} cannot share these images evenly "
                f"in batches of data.images_per_gpu={per_batch}. The nearest that work: "
                f"{', or '.join(_nearest_divisions(images, per_batch, processes))}."
            )
        return replace(self, accumulate=images // unit)

    def steps_per_epoch(self, num_batches: int) -> int:
        """Return the number of optimizer steps in an epoch of so many batches on each rank."""
        return -(-num_batches // self.accumulate)

    def check_batch_size(self, batch_size: int) -> None:
        """Warn if `batch_size`, the images per optimizer step, is not the one that the learning rate is meant for."""
        reference = self.reference_batch_size
        if reference is not None and reference != batch_size:
            logger.warning(
                f"optimizer.lr is meant for {reference} images (tokens for text) per step, and this run has "
                f"{batch_size}: multiply optimizer.lr (and backbone_lr) by about {batch_size / reference:.3g}, or set "
                f"train.images_per_step={reference} (for text train.accumulate)."
            )


def _nearest_divisions(images: int, per_batch: int, processes: int) -> list[str]:
    """Return which changes of one number let processes share the images of a step evenly."""
    counts = [count for count in range(1, images // per_batch + 1) if images % (per_batch * count) == 0]
    near = [*[n for n in counts if n < processes][-1:], *[n for n in counts if n > processes][:1]]
    changes = [f"{' or '.join(map(str, near))} process{'es' * (near != [1])}"] if near else []
    if images % processes == 0:
        share = images // processes
        changes.append(f"data.images_per_gpu={max(n for n in range(1, min(per_batch, share) + 1) if share % n == 0)}")
    unit = per_batch * processes
    steps = [str(step) for step in (images // unit * unit, images // unit * unit + unit) if step]
    return [*changes, f"train.images_per_step={' or '.join(steps)}"]


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Return a warning if a device is slow in a precision, with the override that helps; None if it is not."""
    if precision != "bf16" or has_bfloat16(device):
        return None
    return (
        "train.precision=bf16: this device has no fast instructions for bfloat16 and is slower in it than in float32. "
        "Override it with train.precision=fp32, or with train.precision=auto in a config for any device."
    )


def require(config: Mapping[str, Any], *keys: str) -> None:
    """Check that a config sets the keys that a tool needs.

    Args:
        keys: dotted keys, such as "train.epochs".
    Raises:
        ConfigError: keys are absent or None; all of them are listed.
    """
    missing = [key for key in keys if value_at(config, key) is None]
    if missing:
        path = config.path if isinstance(config, Config) else "config"
        raise ConfigError(f"{path}: {', '.join(missing)} not set; configs/quickstart/detr.py shows each of them.")
