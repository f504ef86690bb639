"""Learning-rate schedules with warm-up, built on torch's own: one learning rate per optimizer step."""

import logging
import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiStepLR, PolynomialLR, SequentialLR

from vitkit.engine.optimizers import BACKBONE
from vitkit.errors import ConfigError
from vitkit.registry import SCHEDULES

logger = logging.getLogger("vitkit")


def _warmup_steps(steps: int, epochs: float, steps_per_epoch: int, run_epochs: int, share: float = 0.0) -> int:
    got = f"got warmup_steps={steps}, warmup_epochs={epochs:g}, warmup_share={share:g}"
    if sum(map(bool, (steps, epochs, share))) > 1:
        raise ConfigError(f"{got}; expected one of them.")
    if steps < 0 or epochs < 0 or not 0 <= share < 1:
        raise ConfigError(f"{got}; expected at least 0, and a fraction of the run below 1.")
    epochs = epochs or share * run_epochs
    steps, total = steps or round(epochs * steps_per_epoch), run_epochs * steps_per_epoch
    if steps > total / 2:
        text = "schedule: the warm-up has %d of the run's %d steps. Shorten it (schedule.warmup_…), or train longer."
        logger.warning(text, steps, total)
    return steps


def _with_warmup(optimizer: Optimizer, schedule: Callable[[], LRScheduler], warmup_steps: int) -> LRScheduler:
    """Return `schedule()`, preceded by a linear rise from near zero over `warmup_steps` steps."""
    if warmup_steps == 0:
        return schedule()
    rise = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
    return SequentialLR(optimizer, [rise, schedule()], milestones=[warmup_steps])


@SCHEDULES.register(name="ConstantLR")
def constant_lr(
    optimizer: Optimizer, steps_per_epoch: int, *, epochs: int, warmup_steps: int = 0, warmup_epochs: float = 0.0
) -> LRScheduler:
    """Keep the rate as it is after the warm-up."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs)
    return _with_warmup(optimizer, lambda: LambdaLR(optimizer, lambda step: 1.0), warmup_steps)


@SCHEDULES.register(name="MultiStepLR")
def multi_step_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    drop_at_epochs: Sequence[float],
    gamma: float = 0.1,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Multiply the rate by `gamma` after each of `drop_at_epochs`; fractions of epochs are rounded to steps."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs)
    # torch counts a schedule's steps from the end of the warm-up.
    drops = [max(1, round(epoch * steps_per_epoch) - warmup_steps) for epoch in drop_at_epochs]
    return _with_warmup(optimizer, lambda: MultiStepLR(optimizer, drops, gamma=gamma), warmup_steps)


class _Cosine(LambdaLR):
    """A cosine schedule in which each group has its own rate; torch's CosineAnnealingLR ends all at the same one."""

    def __init__(self, optimizer: Optimizer, steps: int, end_factor: float):
        self.T_max = steps  # torch's name for it, by which a resumed run is compared
        super().__init__(
            optimizer, lambda step: end_factor + (1 - end_factor) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2
        )


@SCHEDULES.register(name="CosineLR")
def cosine_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    end_factor: float = 0.0,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    warmup_share: float = 0.0,
) -> LRScheduler:
    """Decrease the rate along half a cosine, from the full rate down to `end_factor` of it at the last step."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs, warmup_share)
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: _Cosine(optimizer, steps, end_factor), warmup_steps)


class _FlatCosine(LambdaLR):
    def __init__(self, optimizer: Optimizer, warmup: int, flat_until: int, cosine_until: int, end_factor: float):
        self.milestones = [warmup, flat_until, cosine_until]  # torch's name, by which a resumed run is compared

        def factor(step: int) -> float:
            if step < warmup:
                return (step / warmup) ** 2
            if step <= flat_until:
                return 1.0
            progress = min((step - flat_until) / (cosine_until - flat_until), 1.0)
            return end_factor + (1 - end_factor) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, factor)


@SCHEDULES.register(name="FlatCosineLR")
def flat_cosine_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    flat_until_epoch: float | None = None,
    flat_until_share: float | None = None,
    cosine_until_epoch: float | None = None,
    end_factor: float = 0.5,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
    warmup_share: float = 0.0,
) -> LRScheduler:
    """Keep the full rate for the first part of the run, then decrease it along half a cosine to `end_factor` of it, and
    keep that to the end (RTMDet, https://arxiv.org/abs/2212.07784; DEIM, https://arxiv.org/abs/2412.04234).

    The warm-up rises as the square of the step, from zero.

    Args:
        flat_until_epoch: where the cosine begins.
        flat_until_share: the same as a fraction of the run's epochs, which it then follows; one of the two is set.
        cosine_until_epoch: where it ends; None: with the run.
    Raises:
        ConfigError: both or neither of the first two are set, or warm-up, flat part, cosine, run end in another order.
    """
    if (flat_until_epoch is None) == (flat_until_share is None):
        raise ConfigError(
            f"got flat_until_epoch={flat_until_epoch} and flat_until_share={flat_until_share}; expected one of them."
        )
    if flat_until_epoch is None:
        if not 0 <= flat_until_share < 1:
            raise ConfigError(
                f"flat_until_share={flat_until_share:g}: expected a fraction of the run from 0 to below 1."
            )
        flat_name = f"flat_until_share={flat_until_share:g}"
        flat_until_epoch = min(flat_until_share * epochs, epochs - 1 / steps_per_epoch)  # a step or more is left
    else:
        flat_name = f"flat_until_epoch={flat_until_epoch:g}"
    warmup = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs, warmup_share)
    cosine_until_epoch = epochs if cosine_until_epoch is None else cosine_until_epoch
    flat_until, cosine_until = (round(epoch * steps_per_epoch) for epoch in (flat_until_epoch, cosine_until_epoch))
    if not 0 <= warmup <= flat_until < cosine_until <= epochs * steps_per_epoch:
        raise ConfigError(
            f"the warm-up ends at step {warmup}, {flat_name} is step {flat_until}, "
            f"cosine_until_epoch={cosine_until_epoch:g} is step {cosine_until}, and the run has "
            f"{epochs * steps_per_epoch} steps; expected this order. A shorter run needs a shorter warm-up "
            "(schedule.warmup_steps or warmup_epochs)."
        )
    return _FlatCosine(optimizer, warmup, flat_until, cosine_until, end_factor)


@SCHEDULES.register(name="PolyLR")
def poly_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    power: float = 0.9,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Decrease the rate as (1 - progress) ** power, as usual for semantic segmentation."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs)
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: PolynomialLR(optimizer, steps, power=power), warmup_steps)


class _InverseSqrt(LambdaLR):
    def __init__(self, optimizer: Optimizer, warmup_steps: int):
        self.warmup_steps = warmup_steps  # stored so that a resumed run can be compared by it
        super().__init__(optimizer, lambda step: min((step + 1) / warmup_steps, (warmup_steps / (step + 1)) ** 0.5))


@SCHEDULES.register(name="InverseSqrtLR")
def inverse_sqrt_lr(
    optimizer: Optimizer, steps_per_epoch: int, *, epochs: int, warmup_steps: int = 0, warmup_epochs: float = 0.0
) -> LRScheduler:
    """Increase the rate linearly to the optimizer's, then decrease it as 1 / sqrt(step) (Vaswani et al. 2017, section
    5.3, https://arxiv.org/abs/1706.03762).

    The paper's peak rate is (d_model * warmup_steps) ** -0.5: 7e-4 for the base model's 512 channels and 4000 steps.

    Raises:
        ConfigError: there is no warm-up, which determines the decrease.
    """
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch, epochs)
    if warmup_steps < 1:
        raise ConfigError("warmup_steps=0: expected at least 1, for example the paper's 4000.")
    return _InverseSqrt(optimizer, warmup_steps)


class _TwoStageWarmup(LambdaLR):
    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: int, backbone_warmup: int, power: float):
        self.total_iters = total_steps  # torch's name for it, by which a resumed run is compared

        def factor(step: int, start: int, rise: int) -> float:
            """Return 0 up to `start`, then a linear rise over `rise` steps, then a polynomial decrease to the end."""
            if step < start + rise:
                return max(0, step - start) / max(1, rise)
            progress = (step - start - rise) / max(1, total_steps - start - rise)
            return max(0.0, 1 - progress) ** power

        def others(step: int) -> float:
            return factor(step, 0, warmup)

        def backbone(step: int) -> float:
            return factor(step, warmup, backbone_warmup)

        parts = [group.get("part") for group in optimizer.param_groups]
        super().__init__(optimizer, [backbone if part == BACKBONE else others for part in parts])


@SCHEDULES.register(name="TwoStageWarmupPolyLR")
def two_stage_warmup_poly_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    warmup_steps: int = 500,
    backbone_warmup_steps: int = 1000,
    power: float = 0.9,
) -> LRScheduler:
    """Warm up the new parts while the backbone rests, then the backbone; each then decreases as (1 - progress) ** power
    (EoMT, https://arxiv.org/abs/2503.19108).

    Args:
        warmup_steps: steps from zero to the full rate for all but the backbone, whose rate is zero meanwhile.
        backbone_warmup_steps: steps of the backbone's warm-up after that.
    Raises:
        ConfigError: the optimizer has no backbone groups, or the warm-ups leave no steps at the full rate.
    """
    if all(group.get("part") != BACKBONE for group in optimizer.param_groups):
        raise ConfigError(
            "TwoStageWarmupPolyLR: the optimizer has no groups of the backbone's parameters. Set "
            "optimizer.layer_decay (1.0 for none), and leave part of the backbone trainable."
        )
    total = epochs * steps_per_epoch
    if min(warmup_steps, backbone_warmup_steps) < 0 or warmup_steps + backbone_warmup_steps >= total:
        raise ConfigError(
            f"warmup_steps={warmup_steps} and backbone_warmup_steps={backbone_warmup_steps}: expected values "
            f"of at least 0 whose sum is below the run's {total} steps."
        )
    _warmup_steps(warmup_steps + backbone_warmup_steps, 0.0, steps_per_epoch, epochs)
    return _TwoStageWarmup(optimizer, total, warmup_steps, backbone_warmup_steps, power)
