"""Masks of queries, masks sampled at points, boxes around masks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.ops.boxes import rows_at_once
from vitkit.ops.packed_masks import PackedMasks


def sample_points(maps: Tensor, points: Tensor, *, mode: str = "bilinear", padding_mode: str = "zeros") -> Tensor:
    """Sample maps at points, by default bilinearly; maps are 0 outside.

    Args:
        maps: (N, C, H, W) float.
        points: (N, P, 2) as (x, y) in 0..1, from corner to corner of the map.
        mode, padding_mode: arguments of `torch.nn.functional.grid_sample`.
    Returns:
        (N, C, P) values.
    """
    if padding_mode == "border" and maps.device.type == "mps":  # which PyTorch has there from 2.13
        points, padding_mode = clamp_to_centers(points, maps.shape[-2:]), "zeros"
    grid = (2 * points - 1)[:, None]
    return F.grid_sample(maps, grid, mode=mode, padding_mode=padding_mode, align_corners=False)[:, :, 0]


def clamp_to_centers(points: Tensor, size: Sequence[int]) -> Tensor:
    """Move points (..., 2) in 0..1 between the centers of the outermost pixels of maps of (height, width) `size`."""
    half = points.new_tensor([0.5 / size[1], 0.5 / size[0]])
    return points.maximum(half).minimum(1 - half)


def choose_uncertain_points(points: Tensor, logits: Tensor, count: int) -> Tensor:
    """Choose the points whose logits are nearest to 0 (Kirillov et al. 2020, https://arxiv.org/abs/1912.08193).

    Args:
        points: (N, P, 2).
        logits: (N, P).
        count: number of points to choose out of the P.
    Returns:
        (N, count, 2) points.
    """
    best = logits.abs().neg().topk(count, dim=1, sorted=False).indices  # half of the time of sorted ones
    return points.gather(1, best[..., None].expand(-1, -1, 2))


def mask_logits(mask_embed: Tensor, mask_features: Tensor) -> Tensor:
    """Return the mask logits of queries: (..., Q, C) and (..., C, h, w) -> (..., Q, h, w)."""
    return (mask_embed @ mask_features.flatten(-2)).unflatten(-1, mask_features.shape[-2:])


def masks_of_queries(outputs: Mapping[str, Any], image: int, queries: Tensor | slice = slice(None)) -> Tensor:
    """Return the mask logits of some queries of one image, (N, h, w), which the outputs have or have the factors of."""
    if "pred_masks" in outputs:
        return outputs["pred_masks"][image, queries]
    return mask_logits(outputs["mask_embed"][image, queries], outputs["mask_features"][image])


def pad_masks(masks: Tensor, size: tuple[int, int]) -> Tensor:
    """Pad (N, h, w) with False at the right and bottom to (N, *size)."""
    if isinstance(masks, PackedMasks):
        return masks.pad(size)
    height, width = masks.shape[-2:]
    return F.pad(masks, (0, size[1] - width, 0, size[0] - height))


def resize_target_masks(masks: Tensor, input_size: tuple[int, int], size: Sequence[int]) -> Tensor:
    """Resize masks (N, H, W) of an unpadded image, padded to `input_size`, bilinearly to (N, *size) in 0..1."""
    parts = pad_masks(masks, input_size).split(rows_at_once(math.prod(input_size), masks.device))
    maps = (part.to(torch.float32)[:, None] for part in parts)  # a few at a time: a crowd's would take gigabytes
    return torch.cat([F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)[:, 0] for x in maps])


def unpad_points(points: Tensor, padded: tuple[int, int], part: tuple[int, int]) -> Tensor:
    """Convert points of a padded image, (..., 2) in 0..1, to points of its unpadded part in the top left corner.

    Args:
        padded, part: (height, width).
    """
    scales = torch.tensor([padded[1] / part[1], padded[0] / part[0]], dtype=points.dtype)
    return points * scales.to(points.device, non_blocking=True)


def sample_masks(
    points: Tensor,
    masks: Tensor,
    input_size: tuple[int, int],
    *,
    index: Tensor | None = None,
    mode: Literal["bilinear", "nearest"] = "bilinear",
) -> Tensor:
    """Sample an unpadded image's masks (T, H, W) bool at points of the padded one, 0 in the padding.

    Few masks at a time are converted to floating-point numbers, and none for the nearest pixels: a crowd's would take
    gigabytes.

    Args:
        points: (N, P, 2), or (1, P, 2) for all masks.
        index: (N,) int64, the mask of each row; None: all T masks in their order.
        mode: how the pixels around a point are weighted.
    Returns:
        (N, P) of the points' type.
    """
    rows = len(masks) if index is None else len(index)
    grid = (2 * unpad_points(points, input_size, masks.shape[-2:]) - 1)[:, None].expand(rows, -1, -1, -1)
    if mode == "nearest":
        return _read_nearest(grid[:, 0], masks, index).to(points.dtype)
    values = points.new_empty(rows, points.shape[1])
    step = rows_at_once(masks.shape[1:].numel(), masks.device)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        maps = masks[part if index is None else index[part]].to(points.dtype)
        values[part] = F.grid_sample(maps[:, None], grid[part], align_corners=False)[:, 0, 0]
    return values


def _read_nearest(grid: Tensor, masks: Tensor, index: Tensor | None) -> Tensor:
    """Read the pixels of masks (T, H, W) at a grid (N, P, 2) of `grid_sample`, (N, P) bool; False outside."""
    count, height, width = masks.shape
    x, y = ((((along + 1) * side - 1) / 2).round() for along, side in zip(grid.unbind(-1), (width, height)))
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    rows = (torch.arange(count, device=masks.device) if index is None else index)[:, None]
    x, y = (along.where(inside, 0).long() for along in (x, y))
    if isinstance(masks, PackedMasks):
        return masks.pixels(rows, y, x) & inside
    pixels = (rows * height + y) * width + x
    return masks.flatten().index_select(0, pixels.flatten()).view(inside.shape) & inside


def pixels_inside(boxes_xyxy: Tensor, size: Sequence[int]) -> Tensor:
    """Return which pixels have a number from a box's left and top to before its right and bottom edge.

    Args:
        boxes_xyxy: (N, 4) in pixels.
        size: (height, width) H, W.
    Returns:
        (N, H, W) bool.
    """
    left, top, right, bottom = boxes_xyxy[..., None].unbind(1)  # (N, 1) each
    y, x = (torch.arange(side, device=boxes_xyxy.device) for side in size)
    return ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None]


def boxes_around_masks(masks: Tensor) -> Tensor:
    """Return the smallest box around each mask's pixels; zeros for an empty mask.

    Args:
        masks: (N, H, W) bool.
    Returns:
        (N, 4) float32 xyxy in pixels, where the right and bottom edges include the last pixels.
    """
    boxes = []
    for covered, size in ((masks.any(1), masks.shape[2]), (masks.any(2), masks.shape[1])):
        first = covered.int().argmax(1)
        last = size - covered.flip(1).int().argmax(1)
        boxes.append((first, last))
    (x0, x1), (y0, y1) = boxes
    return torch.stack((x0, y0, x1, y1), dim=1).float() * masks.flatten(1).any(1)[:, None]
