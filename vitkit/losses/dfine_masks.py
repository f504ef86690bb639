"""The loss of D-FINE with masks: ECSeg's (2026, https://arxiv.org/abs/2603.18739) and D-FINE-seg's (2026,
https://arxiv.org/abs/2602.23043)."""

from collections.abc import Mapping
from typing import Literal

from torch import nn

from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.dfine import DFINECriterion
from vitkit.losses.instance_masks import InstanceMaskLosses
from vitkit.registry import CRITERIA, Spec


@CRITERIA.register
class DFINEMaskCriterion(InstanceMaskLosses, DFINECriterion):
    """The losses of `DFINECriterion`, and binary cross entropy and dice of the matched masks.

    Boxes and distributions are trained with the union of all layers' matches, masks with those of their own layer.

    Args:
        matcher, weights, class_loss, focal_alpha, focal_gamma, temperature, union, class_weights: see `DFINECriterion`;
            the matcher is a `HungarianBoxMaskMatcher`, or one without costs of masks.
        mask_loss, pixels_per_point, oversample, importance, point_padding: see `InstanceMaskLosses.set_mask_loss`.
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
        class_loss: Literal["varifocal", "mal", "focal"] = "varifocal",
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        temperature: float = 5.0,
        union: bool = True,
        class_weights: ClassWeights | None = None,
        mask_loss: Literal["points", "boxes"] = "points",
        pixels_per_point: int = 16,
        oversample: float = 3.0,
        importance: float = 0.75,
        point_padding: Literal["border", "zeros"] = "zeros",
    ):
        super().__init__(
            matcher,
            weights,
            class_loss=class_loss,
            focal_alpha=focal_alpha,
            focal_gamma=focal_gamma,
            temperature=temperature,
            union=union,
            class_weights=class_weights,
        )
        self.set_mask_loss(
            mask_loss,
            pixels_per_point=pixels_per_point,
            oversample=oversample,
            importance=importance,
            point_padding=point_padding,
        )
