"""Base of all matchers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vitkit.structures import DetectionTarget

LayersOfSet = tuple[Sequence[Mapping[str, Any]], Sequence[DetectionTarget]]
"""The outputs of a set's decoder layers, and the B targets."""


class Matcher(nn.Module):
    """Base of matchers: `matcher(layers_and_targets)` assigns the queries of one or several sets to targets.

    A set is a pair: the outputs of its decoder layers, a list of dicts with the field names of a model's outputs; and
    the B targets. The result has the `Matches` of each set. Matchers of masks also take `input_size`, the (height,
    width) that the images were padded to. Registered in MATCHERS.
    """

    epoch: int = 0
    """The epoch of the training, counted from 0, for matchers that change with it; `MatchedCriterion` sets it."""
    changes_at: int | None = None
    """The epoch from which on it matches in another way."""
    compares_masks: bool = False
    """Whether it takes `input_size`."""
    activation: str = "softmax"
    """The class logits that the matcher expects: "softmax", whose last class is "no object", or "sigmoid", one for each
    class."""
