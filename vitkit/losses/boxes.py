"""Losses between a predicted box and its target."""

from torch import Tensor

from vitkit.ops.boxes import cxcywh_to_xyxy, generalized_box_iou


def box_l1_loss(pred_cxcywh: Tensor, target_cxcywh: Tensor) -> Tensor:
    """Compute the sum of the four absolute differences.

    Args:
        pred_cxcywh: (..., 4) float in 0..1.
        target_cxcywh: (..., 4) float in 0..1.
    Returns:
        (...) float in 0..4.
    """
    return (pred_cxcywh - target_cxcywh).abs().sum(-1)


def box_giou_loss(pred_cxcywh: Tensor, target_cxcywh: Tensor) -> Tensor:
    """Compute 1 - GIoU (Rezatofighi et al. 2019, https://arxiv.org/abs/1902.09630).

    Args:
        pred_cxcywh: (..., 4) float, any one length unit.
        target_cxcywh: (..., 4) float, same unit.
    Returns:
        (...) float in 0..2.
    """
    return 1 - generalized_box_iou(cxcywh_to_xyxy(pred_cxcywh), cxcywh_to_xyxy(target_cxcywh))
