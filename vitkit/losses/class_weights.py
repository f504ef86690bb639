"""Weights of classes in a criterion's class loss, against an imbalance of the classes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.protocols import Criterion
from vitkit.registry import CRITERIA, Spec, nearest
from vitkit.text_format import counted

ClassWeights = Sequence[float] | Mapping[str, float]
"""A weight for each class; or weights by name, 1 for other classes, which `build_criterion` turns into a list."""


def build_criterion(spec: Spec, classes: Sequence[str] | None) -> Criterion:
    """Build a config's `criterion` section; its `class_weights` may be by name.

    Args:
        classes: names of the dataset's classes; None if it has none.
    Raises:
        ConfigError: the section is invalid, or `class_weights` are not for these classes.
    """
    weights = spec.get("class_weights") if isinstance(spec, Mapping) else None
    if weights is None:
        return CRITERIA.build(spec)
    return CRITERIA.build({**spec, "class_weights": _in_order(weights, classes or ())})


def _in_order(weights: ClassWeights, classes: Sequence[str]) -> list[float]:
    """Return the weights in the order of the classes."""
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in classes:
                raise ConfigError(
                    f"criterion.class_weights: the data has no class {name!r}. {nearest(str(name), classes)}"
                )
        return [weights.get(name, 1.0) for name in classes]
    if not isinstance(weights, list | tuple):
        raise ConfigError(f"criterion.class_weights: got {weights!r}; expected {{'NAME': 2.0}}, or a list.")
    if len(weights) != len(classes):
        raise ConfigError(
            f"criterion.class_weights: got {counted(len(weights), 'weights')}; the data has "
            f"{counted(len(classes), 'classes')}. Give one for each, or name the classes: {{'NAME': 2.0}}."
        )
    return list(weights)


def weights_tensor(weights: Any) -> Tensor | None:
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
