"""Optimisers over named parameter groups, and learning-rate schedules with warm-up from torch's own."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
)

from vitkit.errors import ConfigError
from vitkit.registry import OPTIMIZERS, SCHEDULES, nearest


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float,
    backbone_lr: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    decay_norms_and_biases: bool = True,
) -> list[dict]:
    """Sorts the trainable parameters into groups of one learning rate and weight decay.

    Args:
        lr: of every parameter that nothing else names.
        backbone_lr: of the parameters below `backbone`; 0 freezes it.
        lr_multipliers: part of a parameter's dotted name -> factor on `lr`; the first that fits counts.
        decay_norms_and_biases: False takes weight decay off vectors and scalars (norm scales, biases).
    Raises:
        ConfigError: `backbone_lr` beside an `lr` of 0, or a name in `lr_multipliers` fits no parameter.
    """
    multipliers = dict(lr_multipliers or {})
    if backbone_lr is not None:
        if lr == 0:
            raise ConfigError(
                "optimizer.lr=0: expected above 0 beside a backbone_lr, which is kept as a multiple of it."
            )
        multipliers.setdefault("backbone.", backbone_lr / lr)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for part in multipliers:
        if part != "backbone." and not any(part in name for name, _ in named):
            tops = {piece for name, _ in named for piece in name.split(".")[:-1] if not piece.isdigit()}
            raise ConfigError(
                f"optimizer.lr_multipliers: no trainable parameter's name contains {part!r}. {nearest(part, tops)}"
            )
    groups: dict[tuple[float, float], dict] = {}
    for name, parameter in named:
        factor = next((f for part, f in multipliers.items() if part in name), 1.0)
        decay = weight_decay if decay_norms_and_biases or parameter.ndim > 1 else 0.0
        group = groups.setdefault((factor, decay), {"params": [], "lr": lr * factor, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


@OPTIMIZERS.register(name="AdamW")
def adamw(
    model: nn.Module,
    lr: float,
    *,
    backbone_lr: float | None = None,
    weight_decay: float = 1e-4,
    lr_multipliers: dict[str, float] | None = None,
    decay_norms_and_biases: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) over `parameter_groups`."""
    groups = parameter_groups(
        model, lr, weight_decay=weight_decay, backbone_lr=backbone_lr, lr_multipliers=lr_multipliers,
        decay_norms_and_biases=decay_norms_and_biases,
    )  # fmt: skip
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas))


@OPTIMIZERS.register(name="SGD")
def sgd(
    model: nn.Module,
    lr: float,
    *,
    backbone_lr: float | None = None,
    weight_decay: float = 1e-4,
    lr_multipliers: dict[str, float] | None = None,
    decay_norms_and_biases: bool = True,
    momentum: float = 0.9,
) -> Optimizer:
    """Stochastic gradient descent with momentum over `parameter_groups`."""
    groups = parameter_groups(
        model, lr, weight_decay=weight_decay, backbone_lr=backbone_lr, lr_multipliers=lr_multipliers,
        decay_norms_and_biases=decay_norms_and_biases,
    )  # fmt: skip
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def _with_warmup(optimizer: Optimizer, schedule: Callable[[], LRScheduler], warmup_steps: int) -> LRScheduler:
    """`schedule()`, begun after a linear rise from near zero over `warmup_steps` steps."""
    if warmup_steps == 0:
        return schedule()
    rise = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
    return SequentialLR(optimizer, [rise, schedule()], milestones=[warmup_steps])


@SCHEDULES.register(name="StepLR")
def step_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    drop_at_epoch: int,
    gamma: float = 0.1,
    warmup_steps: int = 0,
) -> LRScheduler:
    """Multiplies the rate by `gamma` once, after `drop_at_epoch` epochs."""
    drops = [drop_at_epoch]
    return multi_step_lr(
        optimizer, steps_per_epoch, epochs=epochs, drop_at_epochs=drops, gamma=gamma, warmup_steps=warmup_steps
    )


@SCHEDULES.register(name="MultiStepLR")
def multi_step_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    drop_at_epochs: Sequence[int],
    gamma: float = 0.1,
    warmup_steps: int = 0,
) -> LRScheduler:
    """Multiplies the rate by `gamma` after each of `drop_at_epochs`."""
    # torch counts a schedule's steps from the end of the warm-up.
    drops = [max(1, epoch * steps_per_epoch - warmup_steps) for epoch in drop_at_epochs]
    return _with_warmup(optimizer, lambda: MultiStepLR(optimizer, drops, gamma=gamma), warmup_steps)


@SCHEDULES.register(name="CosineLR")
def cosine_lr(optimizer: Optimizer, steps_per_epoch: int, *, epochs: int, warmup_steps: int = 0) -> LRScheduler:
    """Half a cosine from the full rate down to zero at the last step."""
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: CosineAnnealingLR(optimizer, steps), warmup_steps)


@SCHEDULES.register(name="PolyLR")
def poly_lr(
    optimizer: Optimizer, steps_per_epoch: int, *, epochs: int, power: float = 0.9, warmup_steps: int = 0
) -> LRScheduler:
    """(1 - progress) ** power, as semantic segmentation is trained with."""
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: PolynomialLR(optimizer, steps, power=power), warmup_steps)
