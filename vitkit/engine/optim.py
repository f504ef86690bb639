"""Optimisers over named parameter groups, and learning-rate schedules with warm-up from torch's own."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
)

from vitkit.errors import ConfigError
from vitkit.registry import OPTIMIZERS, SCHEDULES, nearest

_NORMS_AND_EMBEDDINGS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.Embedding)


def parameter_groups(
    model: nn.Module,
    lr: float,
    *,
    weight_decay: float,
    backbone_lr: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    layer_decay: float | None = None,
    decay_norms_and_biases: bool = True,
    decay_norms_and_embeddings: bool = True,
    no_decay: Sequence[str] = (),
) -> list[dict]:
    """Sorts the trainable parameters into groups of one learning rate and weight decay.

    Args:
        lr: of every parameter that nothing else names.
        backbone_lr: of the parameters below `backbone`; 0 freezes it.
        lr_multipliers: part of a parameter's dotted name -> factor on `lr`; the first that fits counts.
        layer_decay: the backbone's last block learns at this part of the rate above it, the one before at this part
            of that, and so on down to the stem; see `layer_factors`. It multiplies the other factors.
        decay_norms_and_biases: False takes weight decay off vectors and scalars (norm scales, biases).
        decay_norms_and_embeddings: False takes it off everything in normalisation layers and embeddings (of queries and
            levels), as detectron2's models are trained; biases of other layers keep it.
        no_decay: parts of the names of other parameters that have none, such as tables of position.
    Raises:
        ConfigError: `backbone_lr` beside an `lr` of 0, a name in `lr_multipliers` or `no_decay` fits no parameter, or
            the backbone has no blocks to decay over.
    """
    multipliers = dict(lr_multipliers or {})
    if backbone_lr is not None:
        if lr == 0:
            raise ConfigError(
                "optimizer.lr=0: expected above 0 beside a backbone_lr, which is kept as a multiple of it."
            )
        multipliers.setdefault("backbone.", backbone_lr / lr)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    _check_parts("lr_multipliers", [part for part in multipliers if part != "backbone."], named)
    _check_parts("no_decay", no_decay, named)
    of_layer = {} if layer_decay is None else layer_factors(model, layer_decay)
    kept = set() if decay_norms_and_embeddings else {id(p) for p in norm_and_embedding_parameters(model)}
    groups: dict[tuple[float, float], dict] = {}
    for name, parameter in named:
        factor = next((f for part, f in multipliers.items() if part in name), 1.0) * of_layer.get(name, 1.0)
        decays = (decay_norms_and_biases or parameter.ndim > 1) and id(parameter) not in kept
        decay = weight_decay if decays and not any(part in name for part in no_decay) else 0.0
        group = groups.setdefault((factor, decay), {"params": [], "lr": lr * factor, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


def norm_and_embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of normalisation layers, of whatever kind, and of embeddings."""
    layers = [module for module in model.modules() if isinstance(module, _NORMS_AND_EMBEDDINGS)]
    return [parameter for layer in layers for parameter in layer.parameters(recurse=False)]


def _check_parts(option: str, parts: Iterable[str], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    for part in parts:
        if not any(part in name for name, _ in named):
            pieces = {piece for name, _ in named for piece in name.split(".") if not piece.isdigit()}
            raise ConfigError(
                f"optimizer.{option}: no trainable parameter's name contains {part!r}. {nearest(part, pieces)}"
            )


def layer_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """Layer-wise learning rates, with which pretrained transformers are fine-tuned (https://arxiv.org/abs/2003.10555).

    The layers are the blocks of `model.backbone` (without one, of the model): modules with an attribute `recompute`,
    in the order in which they were made. What lies before the first block is a layer below it; what lies between two,
    such as downsampling, goes with the lower; everything else is above the last block.

    Args:
        decay: factor from each layer to the one below; 1 for none.
    Returns:
        parameter name -> factor: 1 above the last of N blocks, decay ** (N + 1) before the first.
    Raises:
        ConfigError: decay is not in 0..1, or there are no blocks.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"optimizer.layer_decay: got {decay}; expected above 0, at most 1.")
    inside = "backbone." if hasattr(model, "backbone") else ""
    blocks: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, "recompute") and name.startswith(inside) and not _below(name, blocks[-1:]):
            blocks.append(name)
    if not blocks:
        raise ConfigError(f"optimizer.layer_decay: the backbone of {type(model).__name__} has no blocks to decay over.")
    factors, layer = {}, 0
    for name, _ in model.named_parameters():
        if not name.startswith(inside):
            factors[name] = 1.0
            continue
        block = next((i for i, block in enumerate(blocks) if _below(name, [block])), None)
        if block is not None:
            layer = block + 1
        above = block is None and layer == len(blocks)
        factors[name] = 1.0 if above else decay ** (len(blocks) + 1 - layer)
    return factors


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


@OPTIMIZERS.register(name="AdamW")
def adamw(
    model: nn.Module,
    lr: float,
    *,
    backbone_lr: float | None = None,
    weight_decay: float = 1e-4,
    lr_multipliers: dict[str, float] | None = None,
    layer_decay: float | None = None,
    decay_norms_and_biases: bool = True,
    decay_norms_and_embeddings: bool = True,
    no_decay: Sequence[str] = (),
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101) over `parameter_groups`.

    With a weight decay of 0 it is Adam; the Transformer's has betas (0.9, 0.98) and eps 1e-9.
    """
    groups = parameter_groups(
        model, lr, weight_decay=weight_decay, backbone_lr=backbone_lr, lr_multipliers=lr_multipliers,
        layer_decay=layer_decay, decay_norms_and_biases=decay_norms_and_biases,
        decay_norms_and_embeddings=decay_norms_and_embeddings, no_decay=no_decay,
    )  # fmt: skip
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)


@OPTIMIZERS.register(name="SGD")
def sgd(
    model: nn.Module,
    lr: float,
    *,
    backbone_lr: float | None = None,
    weight_decay: float = 1e-4,
    lr_multipliers: dict[str, float] | None = None,
    layer_decay: float | None = None,
    decay_norms_and_biases: bool = True,
    decay_norms_and_embeddings: bool = True,
    no_decay: Sequence[str] = (),
    momentum: float = 0.9,
) -> Optimizer:
    """Stochastic gradient descent with momentum over `parameter_groups`."""
    groups = parameter_groups(
        model, lr, weight_decay=weight_decay, backbone_lr=backbone_lr, lr_multipliers=lr_multipliers,
        layer_decay=layer_decay, decay_norms_and_biases=decay_norms_and_biases,
        decay_norms_and_embeddings=decay_norms_and_embeddings, no_decay=no_decay,
    )  # fmt: skip
    return torch.optim.SGD(groups, lr=lr, momentum=momentum)


def _warmup_steps(steps: int, epochs: float, steps_per_epoch: int) -> int:
    if steps and epochs:
        raise ConfigError(f"schedule: got warmup_steps={steps} and warmup_epochs={epochs:g}; expected one of them.")
    return steps or round(epochs * steps_per_epoch)


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
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Multiplies the rate by `gamma` once, after `drop_at_epoch` epochs."""
    drops = [drop_at_epoch]
    return multi_step_lr(
        optimizer, steps_per_epoch, epochs=epochs, drop_at_epochs=drops, gamma=gamma, warmup_steps=warmup_steps,
        warmup_epochs=warmup_epochs,
    )  # fmt: skip


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
    """Multiplies the rate by `gamma` after each of `drop_at_epochs`; a part of an epoch is rounded to whole steps."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
    # torch counts a schedule's steps from the end of the warm-up.
    drops = [max(1, round(epoch * steps_per_epoch) - warmup_steps) for epoch in drop_at_epochs]
    return _with_warmup(optimizer, lambda: MultiStepLR(optimizer, drops, gamma=gamma), warmup_steps)


class _Cosine(LambdaLR):
    """torch's CosineAnnealingLR ends every group at one rate, and groups have rates of their own."""

    def __init__(self, optimizer: Optimizer, steps: int, end_factor: float):
        self.T_max = steps  # as torch's is called; a resumed run is compared by it
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
    """Half a cosine from the full rate down to `end_factor` of it at the last step."""
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
    """(1 - progress) ** power, as semantic segmentation is trained with."""
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
    steps = max(1, epochs * steps_per_epoch - warmup_steps)
    return _with_warmup(optimizer, lambda: PolynomialLR(optimizer, steps, power=power), warmup_steps)


class _InverseSqrt(LambdaLR):
    def __init__(self, optimizer: Optimizer, warmup_steps: int):
        self.warmup_steps = warmup_steps  # kept, so that a resumed run is compared by it
        super().__init__(optimizer, lambda step: min((step + 1) / warmup_steps, (warmup_steps / (step + 1)) ** 0.5))


@SCHEDULES.register(name="InverseSqrtLR")
def inverse_sqrt_lr(
    optimizer: Optimizer,
    steps_per_epoch: int,
    *,
    epochs: int,
    warmup_steps: int = 0,
    warmup_epochs: float = 0.0,
) -> LRScheduler:
    """Rises linearly to the optimiser's rate, then falls as 1 / sqrt(step) (Vaswani et al. 2017, section 5.3,
    https://arxiv.org/abs/1706.03762).

    The paper's rate is (d_model * warmup_steps) ** -0.5 at the peak: 7e-4 for the base model's 512 and 4000 steps.

    Raises:
        ConfigError: there is no warm-up, from which the fall is counted.
    """
    warmup_steps = _warmup_steps(warmup_steps, warmup_epochs, steps_per_epoch)
    if warmup_steps < 1:
        raise ConfigError("schedule.warmup_steps: got 0; expected at least 1, such as the paper's 4000.")
    return _InverseSqrt(optimizer, warmup_steps)
