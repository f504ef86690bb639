"""LoRA: frozen layers with a trained update of low rank (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

import functools
import logging
import math
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitkit.errors import ConfigError
from vitkit.kernels.linear import linear
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.layers import Linear
from vitkit.ops.low_rank import FUSED_PARTS, JOINT_WEIGHT, WEIGHT, WHOLE, low_rank_update
from vitkit.protocols.model import Model, child
from vitkit.registry import nearest
from vitkit.text_format import pluralize

logger = logging.getLogger("vitkit")


class LoRAOptions(TypedDict, total=False):
    """Options of `LoRA`."""

    layers: str
    rank: int
    alpha: float | None
    dropout: float
    parts: str
    train: str | None


class LoRA:
    """Low-rank updates of a model's layers; all other weights are frozen, except those that are trained in full.

    Patterns are those of file names, for dotted names: "backbone.*qkv" is every layer in the backbone whose name ends
    in "qkv". "|" separates alternatives; one that is a mere name replaces the last name of the alternative before it:
    "backbone.*qkv|proj" is "backbone.*qkv" or "backbone.*proj".

    Args:
        layers: pattern of the names of linear layers, of convolutions without groups, and of `MultiHeadAttention`, of
            which it means the joint projection of queries, keys and values ("head.*self_attn").
        rank: rank of each update.
        alpha: updates are scaled by alpha / rank; None: the rank, for a scale of 1.
        dropout: fraction of the layer's input that its update does not see in training. Layers whose owner multiplies
            by their weights itself, such as Swin's, have none.
        parts: which of queries, keys and values have a pair in layers named "qkv" and in joint projections, which
            compute all three: "qkv", or "qv" as in the paper. Each has a pair of its own.
        train: pattern of the names of parameters, or of the modules that they are in, that are trained in full; None:
            everything outside the backbone, and a classifier's head.
    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        *,
        layers: str | None = None,
        rank: int = 8,
        alpha: float | None = None,
        dropout: float = 0.0,
        parts: str = FUSED_PARTS,
        train: str | None = None,
    ):
        if not layers:
            raise ConfigError("train.lora.layers: not set; expected a pattern of layers, such as 'backbone.*qkv|proj'.")
        if rank < 1:
            raise ConfigError(f"train.lora.rank: got {rank}; expected at least 1.")
        if alpha is not None and alpha <= 0:
            raise ConfigError(f"train.lora.alpha: got {alpha}; expected a value above 0, or None for the rank.")
        if not 0 <= dropout < 1:
            raise ConfigError(f"train.lora.dropout: got {dropout}; expected at least 0 and less than 1.")
        if not parts or not set(parts) <= set(FUSED_PARTS):
            raise ConfigError(
                f"train.lora.parts: got {parts!r}; expected letters out of {FUSED_PARTS!r}, such as 'qv'."
            )
        self.layers, self.rank, self.dropout, self.parts, self.train = layers, rank, dropout, parts, train
        self.alpha = float(rank if alpha is None else alpha)

    def add_to(self, model: nn.Module) -> list[str]:
        """Freeze a model except for what is trained in full, and add pairs to its layers; return these layers' names.

        B starts at zero, so the outputs stay the same. Batch norms that are not trained keep their statistics.

        Raises:
            ConfigError: a pattern matches nothing, the model computes a layer without gradients, or the rank is larger
                than a layer.
        """
        layers = {name: module for name, module in model.named_modules() if _can_be_updated(module)}
        kind = "linear layer, convolution without groups or MultiHeadAttention"
        chosen = _matching(self.layers, layers, "train.lora.layers", kind)
        if isinstance(model, Model) and model.freeze_backbone and any(name.startswith("backbone.") for name in chosen):
            raise ConfigError(
                f"train.lora.layers={self.layers!r}: model.freeze_backbone=True computes the backbone without "
                "gradients. Set it to False: LoRA freezes the weights itself."
            )
        trained = self.list_trained_names(model)
        both = [name for name in chosen if f"{name}.{_find_updated_name(layers[name])}" in trained]
        if both and self.train is not None:
            count = pluralize(len(both), "layers")
            logger.warning(
                "train.lora: layers=%r and train=%r both name %s, such as %r: only their updates are trained",
                self.layers, self.train, count, both[0],
            )  # fmt: skip
        for name in chosen:
            weight: Any = getattr(layers[name], _find_updated_name(layers[name]))
            if self.rank > max(len(weight), weight[0].numel()):
                raise ConfigError(
                    f"train.lora.rank: got {self.rank}; {name!r} has only {weight[0].numel()} inputs and {len(weight)} "
                    "outputs. Expected a small number, such as 8."
                )
        for name, parameter in model.named_parameters():
            if name not in trained:
                parameter.requires_grad_(False)
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and not any(f"{name}.{leaf}" in trained for leaf in module.state_dict()):
                module.train = MethodType(_stay_in_evaluation, module)  # type: ignore[method-assign]
                module.eval()
        for name in chosen:
            for parameter in layers[name].parameters(recurse=False):
                parameter.requires_grad_(False)
            _add_pairs(layers[name], self, is_fused=name.rpartition(".")[2] == FUSED_PARTS)
        return chosen

    def list_trained_names(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters and buffers that are trained in full, before pairs are added.

        Raises:
            ConfigError: `train` matches nothing.
        """
        names = list(model.state_dict())
        if self.train is not None:
            parents = {name: [name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))] for name in names}
            known = {parent for name in names for parent in parents[name]}
            wanted = set(_matching(self.train, known, "train.lora.train", "parameter or part"))
            return {name for name in names if wanted & set(parents[name])}
        heads = tuple(model.class_head) if isinstance(model, Model) else ()
        base = "backbone." if child(model, "backbone") is not None else ""
        return {name for name in names if not name.startswith(base) or name.startswith(heads)}


class LowRankPair(nn.Module):
    """The matrices A, random as in a new linear layer, and B, zero at first."""

    def __init__(self, in_features: int, out_features: int, rank: int, like: Tensor):
        super().__init__()
        self.a = nn.Parameter(like.new_empty(rank, in_features))
        self.b = nn.Parameter(like.new_zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return F.linear(F.linear(x, self.a), self.b)


class _Updated(nn.Module):
    """A layer with a frozen weight and pairs, which `_add_pairs` makes of an existing layer."""

    lora: nn.ModuleDict
    lora_scale: float
    lora_dropout: float

    @property
    def weight(self) -> Tensor:
        """The weight with the update, for code that multiplies by it without calling the layer."""
        return self.frozen_weight + self.update.view_as(self.frozen_weight)

    @property
    def frozen_weight(self) -> Tensor:
        """The weight without the update."""
        weight = self._parameters[_find_updated_name(self)]
        assert weight is not None
        return weight

    @property
    def update(self) -> Tensor:
        """(out_features, in_features), the scaled product of the pairs."""
        return self.lora_scale * low_rank_update({part: (pair.a, pair.b) for part, pair in self.lora.items()})


class LoRALinear(_Updated, Linear):
    """A linear layer with a trained update of low rank."""

    takes_fast_product: bool
    """Whether the layer was a `Linear` rather than torch's, so that its outputs stay the same to the last bit."""

    def forward(self, x: Tensor) -> Tensor:
        output = (linear if self.takes_fast_product else F.linear)(x, self.frozen_weight, self.bias)
        x = F.dropout(x, self.lora_dropout, self.training)
        if WHOLE in self.lora:
            return output + self.lora_scale * self.lora[WHOLE](x)
        branches = {part: pair(x) for part, pair in self.lora.items()}
        zeros = torch.zeros_like(next(iter(branches.values())))
        return output + self.lora_scale * torch.cat([branches.get(part, zeros) for part in FUSED_PARTS], dim=-1)


class LoRAConv2d(_Updated, nn.Conv2d):
    """A convolution with a trained update of low rank: A is its kernel with `rank` outputs, B one of 1x1."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, h, w)."""
        if not (self.training and self.lora_dropout):
            return super().forward(x)
        output = self._conv_forward(x, self.frozen_weight, self.bias)
        update = self.update.view_as(self.frozen_weight)
        return output + self._conv_forward(F.dropout(x, self.lora_dropout), update, None)


class LoRAAttention(_Updated, MultiHeadAttention):
    """Attention whose joint projection of queries, keys and values has trained updates of low rank."""

    @property
    def in_proj_weight(self) -> Tensor:  # type: ignore[override]
        """The joint projection with the updates."""
        return self.weight


@functools.cache
def _derive_updated_class(original: type[nn.Module]) -> type[_Updated]:
    """Return the class of a layer with pairs."""
    if original is MultiHeadAttention:
        return LoRAAttention
    if issubclass(original, MultiHeadAttention):  # which has methods of its own
        return type(f"LoRA{original.__name__}", (LoRAAttention, original), {})
    return LoRALinear if issubclass(original, nn.Linear) else LoRAConv2d


def _find_updated_name(layer: nn.Module) -> str:
    """Return the name of the parameter that pairs update."""
    return JOINT_WEIGHT if isinstance(layer, MultiHeadAttention) else WEIGHT


def _can_be_updated(module: nn.Module) -> bool:
    if isinstance(module, MultiHeadAttention):
        return True
    # Not other subclasses, which may compute something else.
    return type(module) in (nn.Linear, Linear, nn.modules.linear.NonDynamicallyQuantizableLinear) or (
        type(module) is nn.Conv2d and module.groups == 1
    )


def _add_pairs(layer: nn.Module, lora: LoRA, *, is_fused: bool) -> None:
    weight: Any = getattr(layer, _find_updated_name(layer))
    rows, columns = len(weight), weight[0].numel()
    pairs = nn.ModuleDict()
    is_fused = is_fused and isinstance(layer, nn.Linear) and rows % len(FUSED_PARTS) == 0
    if is_fused or isinstance(layer, MultiHeadAttention):
        for part in sorted(set(lora.parts), key=FUSED_PARTS.index):
            pairs[part] = LowRankPair(columns, rows // len(FUSED_PARTS), lora.rank, weight)
    else:
        pairs[WHOLE] = LowRankPair(columns, rows, lora.rank, weight)
    fast = isinstance(layer, Linear)
    # In place, so that names, and references of other modules, stay as they are.
    layer.__class__ = _derive_updated_class(type(layer))
    layer.takes_fast_product = fast
    layer.lora, layer.lora_scale, layer.lora_dropout = pairs, lora.alpha / lora.rank, lora.dropout


def _stay_in_evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, False)


def _matching(pattern: str, names: Iterable[str], key: str, kind: str) -> list[str]:
    """Return the names that a pattern matches, see `LoRA`; raise a ConfigError if one of its alternatives matches
    none."""
    if not all(text.strip() for text in pattern.split("|")):  # an empty last name would fit all that it is in
        raise ConfigError(f"{key}={pattern!r}: an alternative is empty. Leave out the '|' beside it.")
    if re.search(r"[()]", pattern):
        raise ConfigError(f"{key}={pattern!r}: has parentheses, which patterns lack: write 'backbone.*qkv|proj'.")
    names = [name for name in names if name]
    chosen: dict[str, None] = {}
    for alternative in _alternatives(pattern):
        matches = [name for name in names if fnmatchcase(name, alternative)]
        if not matches:
            ends = {name.rpartition(".")[2] for name in names}
            last = re.split(r"[.*]", alternative)[-1]
            hint = f"Did you mean '*.{last}', as names begin with their parts?" if last in ends else nearest(last, ends)
            raise ConfigError(
                f"{key}={pattern!r}: the model has no {kind} whose name fits {alternative!r}. "
                f"{hint} These are the ends of names"
                f"{f' such as {names[0]!r}' if names else ''}."
            )
        chosen |= dict.fromkeys(matches)
    return list(chosen)


def _alternatives(pattern: str) -> list[str]:
    alternatives: list[str] = []
    for text in pattern.split("|"):
        if alternatives and "." not in text and "*" not in text:
            text = re.sub(r"[^.*]*$", "", alternatives[-1]) + text
        alternatives.append(text)
    return alternatives
