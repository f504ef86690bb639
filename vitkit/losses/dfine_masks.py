"""The loss of D-FINE with masks: ECSeg's (2026, https://arxiv.org/abs/2603.18739) and D-FINE-seg's (2026,
https://arxiv.org/abs/2602.23043)."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from vitkit.losses.dfine import DFINECriterion
from vitkit.losses.instance_masks import InstanceMaskLosses
from vitkit.registry import CRITERIA, Spec


@CRITERIA.register
class DFINEMaskCriterion(InstanceMaskLosses, DFINECriterion):
    """The losses of `DFINECriterion`, and binary cross entropy and dice of the matched masks.

    Boxes and distributions are trained with the union of all layers' matches, masks with those of their own layer.

    Args:
        matcher: as of `DFINECriterion`: a `HungarianBoxMaskMatcher`, or one without costs of masks.
        weights: see `DFINECriterion`.
        point_padding: see `InstanceMaskLosses`.
        options: see `DFINECriterion` and `InstanceMaskLosses`.
    Raises:
        ConfigError: a number is out of range; and see `DFINECriterion`.
    """

    terms = ("labels", "l1", "giou", "fgl", "ddf", "mask", "dice")
    needs_outputs = (*DFINECriterion.needs_outputs, "mask_embed", "input_size")

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        point_padding: Literal["border", "zeros"] = "zeros",
        **options: Any,
    ):
        super().__init__(matcher, weights, point_padding=point_padding, **options)
