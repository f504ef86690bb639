"""Weights of classes in a criterion's class loss, against an imbalance of the classes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import ConfigError

ClassWeights = Sequence[float] | Mapping[str, float]
"""A weight for each class; or weights by name, 1 for other classes, which `build_criterion` turns into a list."""


def make_weights_tensor(weights: Any) -> Tensor | None:
    """Return a criterion's `class_weights` as a tensor, (C,) float32; None for None.

    Raises:
        ConfigError: they are by name, or one is not a positive number.
    """
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        raise ConfigError("class_weights: names need the data's classes: use build_criterion, or give a list.")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"class_weights={list(weights)}: expected positive numbers.")
    return torch.tensor(list(weights), dtype=torch.float32)
