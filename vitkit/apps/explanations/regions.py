"""Fractions of the attention in a region of the image, such as an object's box or mask."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.boxes import cxcywh_to_xyxy


def box_region(box_xyxy: Sequence[float], size: tuple[int, int]) -> Tensor:
    """Return the pixels that a box touches, at least one.

    Args:
        box_xyxy: in pixels of the image; the part outside the image is cut off.
        size: (height, width) of the image.
    Returns:
        (H, W) bool.
    """
    region = torch.zeros(size, dtype=torch.bool)
    x0, y0, x1, y1 = (float(side) for side in box_xyxy)
    rows, columns = _find_cells(y0, y1, size[0]), _find_cells(x0, x1, size[1])
    region[rows, columns] = True
    return region


def _find_cells(start: float, end: float, length: int) -> slice:
    first = min(max(math.floor(start), 0), length - 1)
    return slice(first, max(first + 1, min(math.ceil(end), length)))


def attention_ratio(maps: Tensor, region: Tensor, covered: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return the fraction of the attention that is in a region, relative to the region's fraction of the image.

    Uniform attention has a ratio of 1, and attention that is only in the region one of the image's area over the
    region's. A cell that is partly in the region counts partly.

    Args:
        maps: (..., h, w) attention weights, at least 0.
        region: (H, W) bool over the image, at any resolution, at least one pixel.
        covered: height and width of the area that the maps cover, relative to those of the image.
    Returns:
        (...) float32; 0 where a map has no attention.
    """
    height, width = (max(n, round(n * factor)) for n, factor in zip(region.shape, covered))
    padded = F.pad(region.float(), (0, width - region.shape[1], 0, height - region.shape[0]))
    inside = F.adaptive_avg_pool2d(padded[None, None], maps.shape[-2:])[0, 0]
    maps = maps.float()
    fraction = (maps * inside).sum((-2, -1)) / maps.sum((-2, -1)).clamp(min=1e-12)
    return fraction / region.float().mean()


def sampling_ratio(locations: Tensor, weights: Tensor, box_cxcywh: Tensor) -> Tensor:
    """Return the fraction of the attention that sampling points have in a box, relative to the box's fraction of the
    image; 1 for points that are spread evenly over the image.

    Args:
        locations: (heads, ..., 2) xy of the points, relative to the image.
        weights: (heads, ...) their attention weights, which sum to 1 for each head.
        box_cxcywh: (4,) relative to the image; the part outside the image is cut off.
    Returns:
        (heads,) float32.
    """
    box_xyxy = cxcywh_to_xyxy(box_cxcywh).clamp(0, 1)
    inside = ((locations >= box_xyxy[:2]) & (locations < box_xyxy[2:])).all(-1)
    area = (box_xyxy[2:] - box_xyxy[:2]).prod().clamp(min=1e-12)
    return (weights * inside).flatten(1).sum(1) / area
