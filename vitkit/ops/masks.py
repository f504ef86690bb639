"""Masks at points."""

import torch
import torch.nn.functional as F
from torch import Tensor


def sample_points(maps: Tensor, points: Tensor) -> Tensor:
    """Bilinear values of maps at points; outside a map is 0.

    Args:
        maps: (N, C, H, W) float.
        points: (N, P, 2) as (x, y) in 0..1 of the map, corner to corner.
    Returns:
        (N, C, P).
    """
    return F.grid_sample(maps, (2 * points - 1)[:, None], align_corners=False)[:, :, 0]


def most_uncertain(points: Tensor, logits: Tensor, count: int) -> Tensor:
    """The points whose logits are nearest to 0 (Kirillov et al. 2020, https://arxiv.org/abs/1912.08193).

    Args:
        points: (N, P, 2).
        logits: (N, P).
        count: how many of the P.
    Returns:
        (N, count, 2).
    """
    best = logits.abs().neg().topk(count, dim=1).indices
    return points.gather(1, best[..., None].expand(-1, -1, 2))


def pad_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """(N, h, w) padded with False at the right and bottom to (N, *size)."""
    height, width = masks.shape[-2:]
    return F.pad(masks, (0, size[1] - width, 0, size[0] - height))


def points_in_part(points: Tensor, whole: tuple[int, int], part: tuple[int, int]) -> Tensor:
    """Points of a padded image, (..., 2) in 0..1, as points of its un-padded part at the top left.

    Args:
        whole, part: (height, width).
    """
    return points * torch.tensor([whole[1] / part[1], whole[0] / part[0]], dtype=points.dtype, device=points.device)


def boxes_around_masks(masks: Tensor) -> Tensor:
    """The smallest box around each mask's pixels; zeros where a mask is empty.

    Args:
        masks: (N, H, W) bool.
    Returns:
        (N, 4) float32 xyxy in pixels, the right and lower edges being those of the last pixels.
    """
    boxes = []
    for covered, size in ((masks.any(1), masks.shape[2]), (masks.any(2), masks.shape[1])):
        first = covered.int().argmax(1)
        last = size - covered.flip(1).int().argmax(1)
        boxes.append((first, last))
    (x0, x1), (y0, y1) = boxes
    return torch.stack((x0, y0, x1, y1), dim=1).float() * masks.flatten(1).any(1)[:, None]
