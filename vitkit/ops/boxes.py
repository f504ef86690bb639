"""Box formats, scaling, IoU and GIoU.

xyxy is (left, top, right, bottom); cxcywh is (center x, center y, width, height). The IoU here is element-wise;
for all pairs, use torchvision's `box_iou`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import box_convert


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Convert (..., 4) boxes, in any one length unit."""
    return box_convert(boxes_cxcywh, "cxcywh", "xyxy")


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Convert (..., 4) boxes, in any one length unit."""
    return box_convert(boxes_xyxy, "xyxy", "cxcywh")


def clamp_sizes(boxes_cxcywh: Tensor) -> Tensor:
    """Return (..., 4) boxes around the same centers whose negative widths and heights are 0."""
    center, size = boxes_cxcywh.split(2, dim=-1)
    return torch.cat([center, size.clamp(min=0)], dim=-1)


def scale_boxes(boxes: Tensor, image_sizes: Sequence[tuple[int, int]] | Tensor) -> Tensor:
    """Scale relative boxes to pixels, by the size of their image.

    Args:
        boxes: (B, N, 4) float in 0..1, xyxy or cxcywh.
        image_sizes: B pairs (height, width) in pixels, or (B, 2).
    Returns:
        (B, N, 4), the same format in pixels.
    """
    sizes = torch.as_tensor(image_sizes, dtype=boxes.dtype).to(boxes.device, non_blocking=True).view(-1, 2)
    return boxes * sizes.flip(1).repeat(1, 2)[:, None]


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute the IoU, element by element with broadcasting.

    Args:
        a: (..., 4) float, xyxy, any one length unit.
        b: (..., 4) float, xyxy, same unit as a; its leading dimensions broadcast against a's.
    Returns:
        (...) float in 0..1; 0 for two boxes without area.
    """
    intersection, union = _intersection_and_union(a, b)
    return _divide(intersection, union)


def duplicates(boxes_xyxy: Tensor, labels: Tensor, *, iou: float) -> Tensor:
    """Find boxes that overlap a better one of the same class (fast NMS, Bolya et al. 2019,
    https://arxiv.org/abs/1904.02689, section 3.3).

    Unlike in sequential NMS, a box that is itself a duplicate also makes others duplicates, so the result has no loop
    over boxes and can be exported.

    Args:
        boxes_xyxy: (B, N, 4) float, best first, any one length unit.
        labels: (B, N) int.
        iou: the IoU above which a box is a duplicate.
    Returns:
        (B, N) bool.
    """
    same_class = labels[:, :, None] == labels[:, None, :]
    overlaps = (box_iou(boxes_xyxy[:, :, None], boxes_xyxy[:, None, :]) > iou) & same_class
    return overlaps.triu(diagonal=1).any(dim=1)


def inverse_sigmoid(x: Tensor, *, eps: float) -> Tensor:
    """Return the logits of float32 numbers in 0..1, finite because x and 1 - x are clamped to at least `eps`."""
    x = x.clamp(0, 1)
    return (x.clamp(min=eps) / (1 - x).clamp(min=eps)).log()


def generalized_box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Compute GIoU (Rezatofighi et al. 2019, https://arxiv.org/abs/1902.09630), element by element with broadcasting.

    torchvision's version for all pairs gives NaN for two boxes without area, and its element-wise loss has an epsilon
    of 1e-7, which changes the value of boxes that cover less than 1 % of an image.

    Args:
        a: (..., 4) float, xyxy, any one length unit.
        b: (..., 4) float, xyxy, same unit as a; its leading dimensions broadcast against a's.
    Returns:
        (...) float in -1..1; 0 if the smallest box around both has no area.
    """
    intersection, union = _intersection_and_union(a, b)
    hull = _area(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    return _divide(intersection, union) - _divide(hull - union, hull)


def _intersection_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the area of the intersection and of the union."""
    intersection = _area(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    return intersection, _area(a[..., :2], a[..., 2:]) + _area(b[..., :2], b[..., 2:]) - intersection


def _area(low: Tensor, high: Tensor) -> Tensor:
    width, height = (high - low).clamp(min=0).to(torch.promote_types(low.dtype, torch.float32)).unbind(-1)
    return width * height  # which would be infinite above 65,504 in float16


def _divide(part: Tensor, area: Tensor) -> Tensor:
    """Return `part / area`, and 0 where the area is 0: neither the value nor its gradient may be NaN."""
    return part / area.masked_fill(area == 0, 1)


def rows_at_once(num_values: int, device: torch.device) -> int:
    """Return how many rows of `num_values` a tensor should have: few enough for a CPU's cache, enough for a GPU."""
    return max(1, (1 << 24 if device.type == "cuda" else 1 << 18) // max(1, num_values))
