"""Box formats, scaling, IoU and GIoU.

xyxy is (left, top, right, bottom); cxcywh is (centre x, centre y, width, height). torchvision's conversion takes whole
planes of numbers apart and together again, its pairwise IoUs take no batch dimensions, and its element-wise ones add an
epsilon that shows on small boxes, so these are here once, by broadcasting.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """(..., 4) boxes in any one length unit."""
    centre, size = boxes_cxcywh.chunk(2, -1)
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """(..., 4) boxes in any one length unit."""
    return torch.stack(_cxcywh_of(boxes_xyxy), -1)


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
    _, intersection, union, _ = _compare(_cxcywh_of(a), _cxcywh_of(b))
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
    return l1_and_giou(_cxcywh_of(a), _cxcywh_of(b))[1]


def l1_and_giou(
    a_cxcywh: Sequence[Tensor], b_cxcywh: Sequence[Tensor], *, overwrite_a: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of the four absolute differences, and the GIoU, which is computed from the same differences.

    Args:
        a_cxcywh: centres x and y, widths and heights, each (...) float, of any one length unit.
        b_cxcywh: as `a_cxcywh`; broadcasts against it.
        overwrite_a: whether the memory of `a_cxcywh`, of the broadcast shape then, may be used. No gradient passes.
    Returns:
        Two of the broadcast shape; see `generalized_box_iou`.
    """
    l1, intersection, union, hull = _compare(a_cxcywh, b_cxcywh, overwrite_a=overwrite_a)
    outside = _divide_(hull - union, hull)
    return l1, _divide_(intersection, union).sub_(outside)


def _compare(
    a_cxcywh: Sequence[Tensor], b_cxcywh: Sequence[Tensor], *, overwrite_a: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The L1 distance; and four times the areas of the intersection, the union and the common hull."""
    # In place where it can be: the matcher's time is that of writing new memory.
    a_width, a_height = a_cxcywh[2:]
    b_width, b_height = b_cxcywh[2:]
    four_areas = torch.addcmul(4 * b_width * b_height, a_width, a_height, value=4)
    width, height = a_width + b_width, a_height + b_height
    subtract = Tensor.sub_ if overwrite_a else Tensor.sub
    x_apart, y_apart, wider, higher = (subtract(a, b).abs_() for a, b in zip(a_cxcywh, b_cxcywh))
    l1 = (x_apart + y_apart).add_(wider).add_(higher)
    # Along an axis, if twice the distance of the centres exceeds the difference of the sizes, neither side holds the
    # other; else the larger holds the smaller. With the larger of the two numbers, twice the overlap (the gap, if
    # negative) is the sum of the sizes less it, and twice the hull is the sum and it.
    x_apart, y_apart = torch.maximum(x_apart.mul_(2), wider), torch.maximum(y_apart.mul_(2), higher)
    hull = (width + x_apart).mul_(height + y_apart)
    intersection = width.sub_(x_apart).clamp_(min=0).mul_(height.sub_(y_apart).clamp_(min=0))
    return l1, intersection, four_areas.sub_(intersection), hull


def _cxcywh_of(boxes_xyxy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x0, y0, x1, y1 = boxes_xyxy.unbind(-1)
    return (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0


def _divide_(area: Tensor, whole: Tensor) -> Tensor:
    """`area / whole`, and 0 where the whole is empty: neither the value nor its gradient may be NaN.

    `whole` is overwritten.
    """
    # One pass, where comparing and filling are two of ten times its time on a CPU.
    return area / F.threshold_(whole, 0, 1)
