"""Optimisers with parameter groups, and learning-rate schedules with warm-up, built on torch's own."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiStepLR, PolynomialLR, SequentialLR

from vitkit.errors import ConfigError
from vitkit.protocols import HasBlocks, SupportsActivationCheckpointing, child
from vitkit.registry import OPTIMIZERS, SCHEDULES, nearest

_LAYER_KINDS = {"norms": (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm), "embeddings": (nn.Embedding,)}
_VECTORS = "vectors"
_BACKBONE = "backbone"
"""The key that marks groups of the backbone's parameters."""


@dataclass(kw_only=True)
class OptimizerSettings(ABC):
    """The settings common to all optimisers, which sort the trainable parameters into groups of equal rate and weight
    decay.

    An optimiser adds its own, and registers in OPTIMIZERS: `OPTIMIZERS.build(config["optimizer"]).build(model)`.
    """

    lr: float
    """The base learning rate, for parameters without a rate or factor below."""
    backbone_lr: float | None = None
    """Learning rate of the parameters below `backbone`; 0 freezes them."""
    lr_multipliers: Mapping[str, float] | None = None
    """Part of a parameter's dotted name -> factor on `lr`; the first match applies."""
    layer_decay: float | None = None
    """Factor on the learning rate from each block of the backbone to the one below it, from the last block down to the
    stem; see `layer_factors`. It multiplies the other factors, and puts the backbone's parameters in groups of their
    own."""
    layer_decay_rule: Literal["beit", "eomt"] = "beit"
    """"beit": the last block is one step below the rest of the model, and the stem one step below the first block;
    "eomt": the last block has the full rate, and the stem that of the first block."""
    full_rate_blocks: int = 0
    """Number of the backbone's last blocks that `layer_decay` does not apply to."""
    weight_decay: float = 1e-4
    no_weight_decay: Sequence[str] = ()
    """Parameters without weight decay: parts of their names, such as "pos_embed", or kinds of parameters: "vectors"
    (all with at most one dimension: biases, scales of norms), "norms" (all of normalisation layers), "embeddings"."""

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimiser of a model's trainable parameters."""

    def parameter_groups(self, model: nn.Module) -> list[dict]:
        """Return the parameter groups, in the form that torch's optimisers expect.

        Raises:
            ConfigError: `backbone_lr` is combined with an `lr` of 0, a name in `lr_multipliers` or `no_weight_decay`
                matches no parameter, or the backbone has no blocks for `layer_decay`.
        """
        multipliers = dict(self.lr_multipliers or {})
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_parts("lr_multipliers", multipliers, parameters)
        if self.backbone_lr is not None:
            if self.lr == 0:
                raise ConfigError(
                    "optimizer.lr=0: expected above 0 beside a backbone_lr, which is kept as a multiple of it."
                )
            multipliers.setdefault("backbone.", self.backbone_lr / self.lr)
        by_layer = {}
        if self.layer_decay is not None:
            by_layer = layer_factors(model, self.layer_decay, self.layer_decay_rule, self.full_rate_blocks)
        undecayed = self._undecayed(model, parameters)
        groups: dict[tuple[float, float, bool], dict] = {}
        for name, parameter in parameters.items():
            factor = next((f for part, f in multipliers.items() if part in name), 1.0) * by_layer.get(name, 1.0)
            decay = 0.0 if name in undecayed else self.weight_decay
            group = {"params": [], "lr": self.lr * factor, "weight_decay": decay}
            in_backbone = bool(by_layer) and name.startswith("backbone.")
            if in_backbone:
                group["part"] = _BACKBONE
            groups.setdefault((factor, decay, in_backbone), group)["params"].append(parameter)
        return list(groups.values())

    def _undecayed(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
        """Return the names of the parameters without weight decay."""
        kinds = {_VECTORS, *_LAYER_KINDS}
        parts = [part for part in self.no_weight_decay if part not in kinds]
        _check_parts("no_weight_decay", parts, parameters, kinds)
        names = {name for name in parameters if any(part in name for part in parts)}
        if _VECTORS in self.no_weight_decay:
            names |= {name for name, parameter in parameters.items() if parameter.ndim <= 1}
        layer_types = tuple(t for kind in self.no_weight_decay for t in _LAYER_KINDS.get(kind, ()))
        layers = [module for module in model.modules() if isinstance(module, layer_types)]
        ids = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        return names | {name for name, parameter in parameters.items() if id(parameter) in ids}


@OPTIMIZERS.register
@dataclass(kw_only=True)
class AdamW(OptimizerSettings):
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101).

    With a weight decay of 0 this is Adam; the Transformer's has betas (0.9, 0.98) and eps 1e-9.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def build(self, model: nn.Module) -> Optimizer:
        """Return torch's AdamW, fused."""
        groups = self.parameter_groups(model)
        return torch.optim.AdamW(groups, lr=self.lr, betas=tuple(self.betas), eps=self.eps, fused=True)


@OPTIMIZERS.register
@dataclass(kw_only=True)
class SGD(OptimizerSettings):
    """Stochastic gradient descent with momentum, optionally Nesterov's."""

    momentum: float = 0.9
    nesterov: bool = False

    def build(self, model: nn.Module) -> Optimizer:
        """Return torch's SGD.

        Raises:
            ConfigError: `nesterov` is set without momentum.
        """
        if self.nesterov and self.momentum <= 0:
            raise ConfigError(f"optimizer.nesterov: needs momentum; got optimizer.momentum={self.momentum}.")
        groups = self.parameter_groups(model)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


def _check_parts(
    option: str, parts: Iterable[str], parameters: Mapping[str, nn.Parameter], kinds: Iterable[str] = ()
) -> None:
    for part in parts:
        if not any(part in name for name in parameters):
            pieces = {piece for name in parameters for piece in name.split(".") if not piece.isdigit()}
            raise ConfigError(
                f"optimizer.{option}: no trainable parameter's name contains {part!r}. "
                f"{nearest(part, {*pieces, *kinds})}"
            )


def layer_factors(
    model: nn.Module, decay: float, rule: Literal["beit", "eomt"] = "beit", full_rate_blocks: int = 0
) -> dict[str, float]:
    """Compute layer-wise learning rates for fine-tuning pretrained transformers (https://arxiv.org/abs/2003.10555).

    The layers are the blocks of `model.backbone` (or of the model, if it has none): modules with an attribute
    `activation_checkpointing`, in the order of their creation, or what a backbone itself declares as its blocks
    (`HasBlocks`). Parameters before the first block form a layer below it (by the rule of EoMT,
    https://arxiv.org/abs/2503.19108, they belong to it); those between two blocks, such as downsampling, belong to the
    lower one; all others are above the last block.

    Args:
        decay: factor from each layer to the one below it; 1 for no decay.
        rule, full_rate_blocks: see `OptimizerSettings`.
    Returns:
        parameter name -> factor. By "beit" it is 1 above the last of N blocks and decay ** (N + 1) before the first; by
        "eomt" 1 from the last block on and decay ** (N - 1) in the first and before it.
    Raises:
        ConfigError: decay is not in 0..1, there are no blocks, or fewer than `full_rate_blocks`.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"optimizer.layer_decay: got {decay}; expected above 0, at most 1.")
    if rule not in ("beit", "eomt"):
        raise ConfigError(f"optimizer.layer_decay_rule: got {rule!r}; expected 'beit' or 'eomt'.")
    inside = "backbone." if child(model, "backbone") is not None else ""
    blocks = _block_names(model, inside)
    if not blocks:
        raise ConfigError(f"optimizer.layer_decay: the backbone of {type(model).__name__} has no blocks to decay over.")
    if not 0 <= full_rate_blocks <= len(blocks):
        raise ConfigError(
            f"optimizer.full_rate_blocks: got {full_rate_blocks}; expected 0 to {len(blocks)}, the backbone's blocks."
        )
    factors, layer = {}, 0
    for name, _ in model.named_parameters():
        block = next((i for i, block in enumerate(blocks, start=1) if _below(name, [block])), None)
        layer = layer if block is None else block
        above = not name.startswith(inside) or (block is None and layer == len(blocks))
        if above or (block is not None and block > len(blocks) - full_rate_blocks):
            factors[name] = 1.0
        else:
            factors[name] = decay ** (len(blocks) + 1 - layer if rule == "beit" else len(blocks) - max(layer, 1))
    return factors


def _block_names(model: nn.Module, inside: str) -> list[str]:
    """Return the names of the blocks below the prefix `inside`, in order."""
    backbone = child(model, "backbone")
    if isinstance(backbone, HasBlocks):
        return [f"backbone.{name}" for name in backbone.block_names()]
    blocks: list[str] = []
    for name, module in model.named_modules():
        is_block = isinstance(module, SupportsActivationCheckpointing)
        if is_block and name.startswith(inside) and not _below(name, blocks[-1:]):
            blocks.append(name)
    return blocks


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _warmup_steps(steps: int, epochs: float, steps_per_epoch: int) -> int:
    if steps and epochs:
        raise ConfigError(f"schedule: got warmup_steps={steps} and warmup_epochs={epochs:g}; expected one of them.")
    return steps or round(epochs * steps_per_epoch)


def _with_warmup(optimizer: Optimizer, schedule: Callable[[], LRScheduler], warmup_steps: int) -> LRScheduler:
    """Return `schedule()`, preceded by a linear rise from near zero over `warmup_steps` steps."""
    if warmup_steps == 0:
        return schedule()
    rise = LinearLR(optimizer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps)
    return SequentialLR(optimizer, [rise, schedule()], milestones=[warmup_steps])


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
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
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
) -> LRScheduler:
    """Decrease the rate along half a cosine, from the full rate down to `end_factor` of it at the last step."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: _Cosine(optimizer, steps, end_factor), warmup_steps)


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
    """Decrease the rate as (1 - progress) ** power, as is usual for semantic segmentation."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
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
    """Increase the rate linearly to the optimiser's, then decrease it as 1 / sqrt(step) (Vaswani et al. 2017, section
    5.3, https://arxiv.org/abs/1706.03762).

    The paper's peak rate is (d_model * warmup_steps) ** -0.5: 7e-4 for the base model's 512 channels and 4000 steps.

    Raises:
        ConfigError: there is no warm-up, which determines the decrease.
    """
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
    if warmup_steps < 1:
        raise ConfigError("schedule.warmup_steps: got 0; expected at least 1, such as the paper's 4000.")
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
        super().__init__(optimizer, [backbone if part == _BACKBONE else others for part in parts])


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
        ConfigError: the optimiser has no backbone groups, or the warm-ups leave no steps at the full rate.
    """
    if all(group.get("part") != _BACKBONE for group in optimizer.param_groups):
        raise ConfigError(
            "schedule TwoStageWarmupPolyLR: the optimizer has no groups of the backbone's parameters. Set "
            "optimizer.layer_decay (1.0 for none), and leave part of the backbone trainable."
        )
    total = epochs * steps_per_epoch
    if min(warmup_steps, backbone_warmup_steps) < 0 or warmup_steps + backbone_warmup_steps >= total:
        raise ConfigError(
            f"schedule: warmup_steps={warmup_steps} and backbone_warmup_steps={backbone_warmup_steps}: expected 0 or "
            f"more, together fewer than the run's {total} steps."
        )
    return _TwoStageWarmup(optimizer, total, warmup_steps, backbone_warmup_steps, power)
