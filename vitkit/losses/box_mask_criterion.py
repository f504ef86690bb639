"""The loss of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554): classes, boxes and masks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.losses.class_weights import ClassWeights
from vitkit.losses.instance_masks import InstanceMaskLosses
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class BoxMaskCriterion(InstanceMaskLosses):
    """The losses of `SetCriterion`, and binary cross entropy and dice of the matched masks, for every decoder layer.

    Args:
        matcher, weights, class_loss, no_object_weight, focal_alpha, focal_gamma, class_weights: see `SetCriterion`; the
            matcher is a `HungarianBoxMaskMatcher`, or one without costs of masks.
        mask_loss, pixels_per_point, oversample, importance, point_padding: see `InstanceMaskLosses.set_mask_loss`.
    Raises:
        ConfigError: a number is out of range; and see `SetCriterion`.
    """

    terms = ("labels", "l1", "giou", "mask", "dice")
    needs_outputs = ("pred_logits", "pred_boxes", "mask_embed", "input_size")

    def __init__(
        self,
        matcher: Spec | nn.Module,
        weights: Mapping[str, float],
        *,
        class_loss: Literal["cross_entropy", "focal", "varifocal", "mal", "iou_aware"] = "iou_aware",
        no_object_weight: float | None = None,
        focal_alpha: float | None = None,
        focal_gamma: float | None = None,
        class_weights: ClassWeights | None = None,
        mask_loss: Literal["points", "boxes"] = "points",
        pixels_per_point: int = 16,
        oversample: float = 3.0,
        importance: float = 0.75,
        point_padding: Literal["border", "zeros"] = "border",
    ):
        super().__init__(
            matcher,
            weights,
            class_loss=class_loss,
            no_object_weight=no_object_weight,
            focal_alpha=focal_alpha,
            focal_gamma=focal_gamma,
            class_weights=class_weights,
        )
        self.set_mask_loss(
            mask_loss,
            pixels_per_point=pixels_per_point,
            oversample=oversample,
            importance=importance,
            point_padding=point_padding,
        )

    def forward(self, outputs: Mapping[str, Any], targets: Sequence[DetectionTarget]) -> dict[str, Tensor]:
        """Match queries to targets, and compute the losses of every layer.

        Args:
            outputs: those of `SetCriterion`; for all layers and training_outputs that predict masks also mask_embed (B,
                Q, C) and mask_features (B, C, h, w), whose product is the masks; input_size (height, width) that these
                cover.
            targets: B targets with labels in 0..C-1, boxes and masks (N, H, W) bool of the unpadded images.
        Returns:
            Weighted scalars whose sum is the loss: `labels l1 giou mask dice` with the prefixes of `SetCriterion`.
        Raises:
            DataError: a label is out of range.
        """
        return super().forward(outputs, targets)
