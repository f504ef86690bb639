"""The loss of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554): classes, boxes and masks."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.losses.instance_masks import InstanceMaskLosses
from vitkit.registry import CRITERIA, Spec
from vitkit.structures import DetectionTarget


@CRITERIA.register
class BoxMaskCriterion(InstanceMaskLosses):
    """The losses of `SetCriterion`, and binary cross entropy and dice of the matched masks, for every decoder layer.

    Args:
        matcher: as of `SetCriterion`: a `HungarianBoxMaskMatcher`, or one without costs of masks.
        weights, class_loss: see `SetCriterion`.
        options: see `SetCriterion` and `InstanceMaskLosses`.
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
        **options: Any,
    ):
        super().__init__(matcher, weights, class_loss=class_loss, **options)

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
