"""Torch's optimizers over the trainable parameters, in groups of equal learning rate and weight decay."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitkit.errors import ConfigError
from vitkit.nn.activation_checkpointing import find_recomputable_blocks
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import Model, child
from vitkit.registry import OPTIMIZERS, nearest

logger = logging.getLogger("vitkit")
LayerDecayRule = Literal["beit", "eomt"]
BACKBONE = "backbone"
"""The value of "part" in the groups of the backbone's parameters, if `layer_decay` is set."""
_LAYER_KINDS = {
    "norms": (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    "embeddings": (nn.Embedding,),
}
_VECTORS = "vectors"
_KINDS = (_VECTORS, *_LAYER_KINDS)


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 1e-4,
    no_weight_decay: Sequence[str] = (),
    backbone_lr: float | None = None,
    lr_multipliers: Mapping[str, float] | None = None,
    layer_decay: float | None = None,
    layer_decay_rule: LayerDecayRule = "beit",
    full_rate_blocks: int = 0,
) -> list[dict]:
    """Return the trainable parameters in groups of equal learning rate and weight decay, as torch's optimizers expect.

    Names in `no_weight_decay` and `lr_multipliers` that match no parameter have no effect and are logged as a warning,
    so that a recipe may be used with another backbone.

    Args:
        lr: the base learning rate, for parameters without a rate or factor below.
        no_weight_decay: parameters without weight decay: parts of their names, such as "pos_embed", or kinds of
            parameters: "vectors" (all with at most one dimension: biases, scales of norms), "norms" (all of
            normalization layers), "embeddings"; or a kind below a part of the names, such as "backbone.vectors".
        backbone_lr: learning rate of the parameters below `backbone`; 0 freezes them.
        lr_multipliers: part of a parameter's dotted name -> factor on `lr`; the first match applies.
        layer_decay: factor on the learning rate from each block of the backbone to the one below it, see
            `layer_factors`. It multiplies the other factors, and puts the backbone's parameters in groups of their own.
        layer_decay_rule: "beit": the last block is one step below the rest of the model, and the stem one step below
            the first block; "eomt": the last block has the full rate, and the stem that of the first block.
        full_rate_blocks: number of the backbone's last blocks that `layer_decay` does not apply to.
    Raises:
        ConfigError: `backbone_lr` is combined with an `lr` of 0, or the backbone has no blocks for `layer_decay`.
    """
    multipliers = dict(lr_multipliers or {})
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for message in describe_unmatched(model, no_weight_decay=no_weight_decay, lr_multipliers=multipliers):
        logger.warning("%s", message)
    if backbone_lr is not None:
        if lr == 0:
            raise ConfigError("lr=0: expected above 0, because backbone_lr is stored as a multiple of it.")
        multipliers.setdefault("backbone.", backbone_lr / lr)
    by_layer = {}
    if layer_decay is not None:
        by_layer = layer_factors(model, layer_decay, layer_decay_rule, full_rate_blocks)
    undecayed = _find_undecayed(model, parameters, no_weight_decay)
    groups: dict[tuple[float, float, bool], dict] = {}
    for name, parameter in parameters.items():
        factor = next((f for part, f in multipliers.items() if part in name), 1.0) * by_layer.get(name, 1.0)
        decay = 0.0 if name in undecayed else weight_decay
        group = {"params": [], "lr": lr * factor, "weight_decay": decay}
        in_backbone = bool(by_layer) and name.startswith(f"{trained_backbone_name(model)}.")
        if in_backbone:
            group["part"] = BACKBONE
        groups.setdefault((factor, decay, in_backbone), group)["params"].append(parameter)
    return list(groups.values())


def takes_model(build: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Turn a function of parameter groups into one of a model, which also takes the options of `parameter_groups`.

    Args:
        build: takes the groups, the base learning rate `lr`, and options of its own; and, if it wants it, `hidden`: the
            ids of the matrices of hidden layers.
    """
    shared, own = (inspect.signature(function).parameters for function in (parameter_groups, build))

    @functools.wraps(build)
    def build_for(model: nn.Module, *, lr: float, **options: Any) -> Optimizer:
        of_build = {name: options.pop(name) for name in own.keys() & options.keys()}
        if "hidden" in own:
            of_build["hidden"] = _hidden_matrices(model)
        return build(parameter_groups(model, lr=lr, **options), lr=lr, **of_build)

    # Configs are checked by the signature.
    added = [parameter for name, parameter in own.items() if name not in ("groups", "lr", "hidden")]
    build_for.__signature__ = inspect.Signature([*shared.values(), *added], return_annotation=Optimizer)
    return build_for


@OPTIMIZERS.register(name="AdamW")
@takes_model
def adamw(
    groups: Sequence[dict], *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), fused; see `parameter_groups`.

    With a weight decay of 0 this is Adam; the Transformer's has betas (0.9, 0.98) and eps 1e-9.
    """
    return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)


@OPTIMIZERS.register(name="SGD")
@takes_model
def sgd(groups: Sequence[dict], *, lr: float, momentum: float = 0.9, nesterov: bool = False) -> Optimizer:
    """Build stochastic gradient descent with momentum, optionally Nesterov's; see `parameter_groups`.

    Raises:
        ConfigError: `nesterov` is set without momentum.
    """
    if nesterov and momentum <= 0:
        raise ConfigError(f"nesterov: needs momentum; got momentum={momentum}.")
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov)


@OPTIMIZERS.register(name="Muon")
@takes_model
def muon(
    groups: Sequence[dict],
    *,
    lr: float,
    hidden: Set[int],
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Optimizer:
    """Build Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the matrices of hidden layers, and
    AdamW with `betas` and `eps` for all else: vectors, convolutions, embeddings, class heads; see `parameter_groups`.

    Each momentum is replaced by the nearest orthogonal matrix, times 0.2 sqrt(max(rows, columns)), by which its entries
    are as large as AdamW's updates (Liu et al. 2025, https://arxiv.org/abs/2502.16982, equation 4): learning rate and
    weight decay are those of AdamW.

    Raises:
        ConfigError: the model has no such matrices.
    """
    if not hidden:
        raise ConfigError("optimizer.type: Muon is for the matrices of hidden layers, and the model trains none.")
    parts = []
    for group in groups:
        for uses_muon in (True, False):
            chosen = [parameter for parameter in group["params"] if (id(parameter) in hidden) == uses_muon]
            options = {"momentum": momentum} if uses_muon else {"betas": tuple(betas), "eps": eps}
            parts += [{**group, "params": chosen, **options}] if chosen else []
    return _MuonAndAdamW(parts, {"lr": lr})


class _MuonAndAdamW(Optimizer):
    """Muon for the groups with a momentum; for the others AdamW, which shares the groups and the state of this one."""

    def __init__(self, groups: Sequence[dict], defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        others = [group for group in self.param_groups if "momentum" not in group]
        self._adamw = torch.optim.AdamW(others, fused=True) if others else None
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        if self._adamw is not None:
            self._adamw.state = self.state
            self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if self._adamw is not None:
            self._adamw.step()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained if "momentum" in group else ():
                if parameter not in self.state:
                    self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
                mean = self.state[parameter]["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonalize(parameter.grad.lerp(mean, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-0.2 * group["lr"] * max(update.shape) ** 0.5)


def _orthogonalize(matrix: Tensor) -> Tensor:
    """Return about the nearest orthogonal matrix, by five of Newton and Schulz's steps with Muon's coefficients.

    The original computes in bfloat16, which takes 18 times as long as float32 on a processor without it.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if is_tall else x


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the trainable matrices that are weights, but not those of class heads and embeddings."""
    heads = tuple(model.class_head) if isinstance(model, Model) else ()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [p for name, p in model.named_parameters() if name.endswith("weight") and not name.startswith(heads)]
    return {id(weight) for weight in weights if weight.ndim == 2 and weight.requires_grad} - embeddings


def _find_undecayed(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], no_weight_decay: Sequence[str]
) -> set[str]:
    """Return the names of the parameters without weight decay."""
    names = set()
    for item in no_weight_decay:
        part, kind = _part_and_kind(item)
        candidates = _of_kind(model, parameters, kind) if kind else parameters
        names |= {name for name in candidates if part in name}
    return names


def _part_and_kind(item: str) -> tuple[str, str | None]:
    """Split an item of `no_weight_decay` into a part of the parameters' names, "" for all, and a kind, None for any."""
    part, dot, kind = item.rpartition(".")
    return (part + dot, kind) if kind in _KINDS else (item, None)


def _of_kind(model: nn.Module, parameters: Mapping[str, nn.Parameter], kind: str) -> set[str]:
    """Return the names of the parameters of a kind, see `parameter_groups`."""
    if kind == _VECTORS:
        return {name for name, parameter in parameters.items() if parameter.ndim <= 1}
    layers = [module for module in model.modules() if isinstance(module, _LAYER_KINDS[kind])]
    ids = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    return {name for name, parameter in parameters.items() if id(parameter) in ids}


def describe_unmatched(
    model: nn.Module, *, no_weight_decay: Sequence[str] = (), lr_multipliers: Mapping[str, float] | None = None
) -> list[str]:
    """Return a message for each name in these options of `parameter_groups` that matches no trainable parameter."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    pieces = {piece for name in names for piece in name.split(".") if not piece.isdigit()}
    options = (
        ("no_weight_decay", [_part_and_kind(item)[0] for item in no_weight_decay], {*pieces, *_KINDS}),
        ("lr_multipliers", list(lr_multipliers or {}), pieces),
    )
    return [
        f"optimizer.{option}: no trainable parameter's name contains {part!r}, so it has no effect. "
        f"{nearest(part, known)}"
        for option, parts, known in options
        for part in parts
        if not any(part in name for name in names)
    ]


def layer_factors(
    model: nn.Module, decay: float, rule: LayerDecayRule = "beit", full_rate_blocks: int = 0
) -> dict[str, float]:
    """Compute layer-wise learning rates for fine-tuning pretrained transformers (https://arxiv.org/abs/2003.10555).

    The layers are the blocks of `model.backbone` (of the model, if it has none; of the student's backbone in self-
    distillation), in the order of their creation: see `find_recomputable_blocks`, or what a backbone itself declares by
    `block_names`. Parameters before the first block form a layer below it (by the rule of EoMT,
    https://arxiv.org/abs/2503.19108, they belong to it); those between two blocks, such as downsampling, belong to the
    lower one; all others are above the last block.

    Args:
        decay: factor from each layer to the one below it; 1 for no decay.
        rule, full_rate_blocks: see `parameter_groups`.
    Returns:
        parameter name -> factor. By "beit" it is 1 above the last of N blocks and decay ** (N + 1) before the first; by
        "eomt" 1 from the last block on and decay ** (N - 1) in the first and before it.
    Raises:
        ConfigError: decay is not in 0..1, there are no blocks, or fewer than `full_rate_blocks`.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"layer_decay={decay}: expected a value above 0 and at most 1.")
    if rule not in ("beit", "eomt"):
        raise ConfigError(f"layer_decay_rule={rule!r}: expected 'beit' or 'eomt'.")
    inside = f"{trained_backbone_name(model)}." if child(model, "backbone") is not None else ""
    blocks = _block_names(model, inside)
    if not blocks:
        raise ConfigError(f"layer_decay: the backbone of {type(model).__name__} has no blocks to decay over.")
    if not 0 <= full_rate_blocks <= len(blocks):
        raise ConfigError(f"full_rate_blocks={full_rate_blocks}: expected 0 to {len(blocks)}, the backbone's blocks.")
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


def trained_backbone_name(model: nn.Module) -> str:
    """Return the name of the backbone whose parameters the optimizer changes: "backbone", or that of a student."""
    return (model.student_backbone if isinstance(model, Model) else None) or BACKBONE


def _block_names(model: nn.Module, inside: str) -> list[str]:
    """Return the names of the blocks below the prefix `inside`, in order."""
    backbone = child(model, "backbone")
    names = None if backbone is None else with_defaults(backbone, Backbone).block_names()
    if names is not None:
        return [f"{inside}{name}" for name in names]
    blocks: list[str] = []
    for name in find_recomputable_blocks(model):
        if name.startswith(inside) and not _below(name, blocks[-1:]):
            blocks.append(name)
    return blocks


def _below(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)
