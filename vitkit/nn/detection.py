"""Shared parts of detection heads: layers that predict classes and boxes, and boxes relative to references."""

import math
from collections.abc import Iterable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import MLP, Linear
from vitkit.ops.boxes import inverse_sigmoid
from vitkit.registry import nearest
from vitkit.structures import FeatureInfo

PRIOR_PROBABILITY = 0.01
"""Initial class probability: so low that the many queries without an object do not dominate the focal loss."""


def check_channels(owner: str, feature_info: Mapping[str, FeatureInfo], d_model: int) -> None:
    """Raise ConfigError unless all maps have `d_model` channels."""
    for name, info in feature_info.items():
        if info.channels != d_model:
            raise ConfigError(
                f"{owner}: d_model={d_model}, but feature {name!r} has {info.channels} channels: set both to the same "
                "number (model.neck.out_channels, model.head.d_model)."
            )


def check_features(owner: str, names: Iterable[str], feature_info: Mapping[str, FeatureInfo]) -> None:
    """Raise ConfigError unless the backbone has a map of each name."""
    for name in names:
        if name not in feature_info:
            raise ConfigError(f"{owner}: the backbone has no feature {name!r}. {nearest(name, feature_info)}")


def check_at_least_1(owner: str, **numbers: int) -> None:
    """Raise ConfigError if one of a head's numbers of queries, layers or keypoints is below 1."""
    if min(numbers.values()) < 1:
        stated = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise ConfigError(f"{owner}: {stated}: expected at least 1.")


def class_head(d_model: int, num_classes: int) -> nn.Linear:
    """Return a linear layer to class logits, biased to `PRIOR_PROBABILITY`."""
    head = Linear(d_model, num_classes)
    nn.init.constant_(head.bias, -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY))
    return head


def box_head(d_model: int, *, num_outputs: int = 4, activation: str = "relu") -> MLP:
    """Create a box head that initially predicts zeros, for a refined box the reference itself."""
    head = MLP((d_model, d_model, d_model, num_outputs), activation)
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    return head


def boxes_around(references: Tensor, deltas: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Add deltas to reference points or boxes, in logit space.

    Args:
        references: (..., 2) points or (..., 4) boxes cxcywh in 0..1.
        deltas: (..., 4), added before the sigmoid; for a reference point, only they determine the size.
        eps: see `inverse_sigmoid`.
    Returns:
        (..., 4) float32 cxcywh in 0..1.
    """
    logits = inverse_sigmoid(references.float(), eps=eps)
    return (deltas.float() + F.pad(logits, (0, 4 - logits.shape[-1]))).sigmoid()
