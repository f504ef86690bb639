"""Box formats, scaling, IoU and GIoU.

xyxy is (left, top, right, bottom); cxcywh is (centre x, centre y, width, height). torchvision's conversion takes whole
planes of numbers apart and together again, its pairwise IoUs take no batch dimensions, and its element-wise ones add an
epsilon that shows on small boxes, so these are here once, by broadcasting.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import box_convert


def cxcywh_to_xyxy(boxes_cxcywh: Tensor, *, dim: int = -1) -> Tensor:
    """Boxes in any one length unit, their 4 numbers along `dim`."""
    centre, size = boxes_cxcywh.chunk(2, dim)
    return torch.cat((centre - size / 2, centre + size / 2), dim)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """(..., 4) boxes in any one length unit."""
    return box_convert(boxes_xyxy, "xyxy", "cxcywh")


def scale_boxes(boxes: Tensor, image_sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Relative boxes in pixels, each image by its own size.

    Args:
        boxes: (B, N, 4) float in 0..1, xyxy or cxcywh.
        image_sizes: B pairs (height, width) in pixels.
    Returns:
        (B, N, 4), the same format in pixels.
    """
    scale = torch.tensor([(width, height, width, height) for height, width in image_sizes], dtype=boxes.dtype)
    return boxes * scale.to(boxes.device, non_blocking=True)[:, None]


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union, element by element with broadcasting.

    All pairs of (..., N, 4) and (..., M, 4) are `box_iou(a[..., :, None, :], b[..., None, :, :])`, (..., N, M).

    Args:
        a: (..., 4) float, xyxy, any one length unit.
        b: (..., 4) float, xyxy, same unit as a; its leading dimensions broadcast against a's.
    Returns:
        (...) float in 0..1; 0 for two boxes without area.
    """
    intersection, union, _ = _areas(a, b)
    return _divide_(intersection, union)


def generalized_box_iou(a: Tensor, b: Tensor) -> Tensor:
    """GIoU (Rezatofighi et al. 2019, https://arxiv.org/abs/1902.09630), element by element with broadcasting.

    All pairs of (..., N, 4) and (..., M, 4) are
    `generalized_box_iou(a[..., :, None, :], b[..., None, :, :])`, (..., N, M).

    Args:
        a: (..., 4) float, xyxy, any one length unit.
        b: (..., 4) float, xyxy, same unit as a; its leading dimensions broadcast against a's.
    Returns:
        (...) float in -1..1; 0 for two boxes whose common hull has no area.
    """
    intersection, union, hull = _areas(a, b)
    outside = _divide_(hull - union, hull)
    return _divide_(intersection, union).sub_(outside)


def _areas(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the intersection, the union and the common hull."""
    # torchvision.ops.box_area takes batch dimensions only in newer releases, so areas are written out. In place where
    # it can be: the matcher's time is that of writing new memory.
    ax0, ay0, ax1, ay1 = a.unbind(-1)
    bx0, by0, bx1, by1 = b.unbind(-1)
    a_width, a_height, b_width, b_height = ax1 - ax0, ay1 - ay0, bx1 - bx0, by1 - by0
    areas = a_width * a_height + b_width * b_height
    # Less than nothing is the gap between boxes that are apart; what is not shared of both sides spans the hull.
    width = torch.minimum(ax1, bx1).sub_(torch.maximum(ax0, bx0))
    height = torch.minimum(ay1, by1).sub_(torch.maximum(ay0, by0))
    hull = (a_width + b_width).sub_(width).mul_((a_height + b_height).sub_(height))
    intersection = width.clamp_(min=0).mul_(height.clamp_(min=0))
    return intersection, areas.sub_(intersection), hull


def _divide_(area: Tensor, whole: Tensor) -> Tensor:
    """`area / whole`, and 0 where the whole is empty: neither the value nor its gradient may be NaN.

    `whole` is overwritten.
    """
    # One pass, where comparing and filling are two of ten times its time on a CPU.
    return area / F.threshold_(whole, 0, 1)
