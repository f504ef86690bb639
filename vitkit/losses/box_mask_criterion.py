"""The loss of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554): classes, boxes and masks."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from vitkit.losses.instance_masks import InstanceMaskLosses
from vitkit.registry import CRITERIA, Spec


@CRITERIA.register
class BoxMaskCriterion(InstanceMaskLosses):
    """The losses of `SetCriterion`, and binary cross entropy and dice of the matched masks, for every decoder layer.

    Outputs also have mask_embed (B, Q, C) and mask_features (B, C, h, w), whose product is the masks, in all layers and
    training_outputs that predict masks, and input_size, the (height, width) that these cover; targets masks (N, H, W)
    bool of the unpadded images. Losses are `labels l1 giou mask dice` with the prefixes of `SetCriterion`.

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
