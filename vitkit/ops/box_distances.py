"""Boxes as distances of their edges from an initial box (D-FINE, Peng et al. 2024, https://arxiv.org/abs/2410.13842).

A distance is measured from the initial box's edge, outwards, in units of its width or height divided by `reg_scale`:
0 is the edge itself, and -reg_scale / 2 the center. Distances are ordered left, top, right, bottom. A head predicts
them as a distribution over bins, which are dense around 0.
"""

import torch
from torch import Tensor

from vitkit.errors import ConfigError

MIN_SIZE = 1e-16
"""A width or height below this counts as this, so that distances stay finite."""


def distance_bins(reg_max: int, reg_scale: float, up: float) -> Tensor:
    """Compute the weighting function W(n), the distance that each bin stands for (section 4.1).

    With a = up * reg_scale, the outermost bins are -2a and 2a, and the others grow exponentially from 0 to a.

    Args:
        reg_max: number of bins minus one.
        reg_scale: number of units in an initial box's width or height; a larger value has bins of finer shares of it.
        up: bound on the distances, in shares of the width or height.
    Returns:
        (reg_max + 1,) float32, ascending and symmetric around 0.
    Raises:
        ConfigError: reg_max is odd or below 4, or another argument is not positive.
    """
    if reg_max < 4 or reg_max % 2:
        raise ConfigError(
            f"reg_max={reg_max}: expected an even number of at least 4, for two bins on each side of the middle one."
        )
    if reg_scale <= 0 or up <= 0:
        raise ConfigError(f"reg_scale={reg_scale}, up={up}: expected positive numbers.")
    bound = up * reg_scale
    step = (bound + 1) ** (2 / (reg_max - 2))
    half = [step**i - 1 for i in range(1, reg_max // 2)] + [2 * bound]
    return torch.tensor([*(-distance for distance in reversed(half)), 0.0, *half])


def boxes_at_distances(initial_cxcywh: Tensor, distances: Tensor, reg_scale: float) -> Tensor:
    """Return the boxes whose edges have the given distances from those of initial boxes (section 4.1).

    Args:
        initial_cxcywh: (..., 4), in any one length unit.
        distances: (..., 4) left, top, right, bottom.
    Returns:
        (..., 4) cxcywh. The width or height is negative where opposite edges have crossed.
    """
    center, size = initial_cxcywh.split(2, dim=-1)
    before, after = (distances + 0.5 * reg_scale).split(2, dim=-1)
    unit = size / reg_scale
    return torch.cat([center + 0.5 * (after - before) * unit, (before + after) * unit], dim=-1)


def distances_of_boxes(initial_cxcywh: Tensor, boxes_xyxy: Tensor, reg_scale: float) -> Tensor:
    """Return the distances of boxes' edges from those of initial boxes, the inverse of `boxes_at_distances`.

    Args:
        initial_cxcywh: (..., 4), in any one length unit.
        boxes_xyxy: (..., 4), in the same unit.
    Returns:
        (..., 4) left, top, right, bottom; finite also for an initial box without area.
    """
    center, size = initial_cxcywh.split(2, dim=-1)
    top_left, bottom_right = boxes_xyxy.split(2, dim=-1)
    from_center = torch.cat([center - top_left, bottom_right - center], dim=-1)
    return from_center / (size / reg_scale).clamp(min=MIN_SIZE).tile(2) - 0.5 * reg_scale


def neighboring_bins(distances: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each distance between the bins on its left and right, so that their mean is the distance.

    Args:
        distances: (...).
        bins: (N,) ascending, as from `distance_bins`.
    Returns:
        left: (...) int64 in 0..N-2, the bin at or below the distance; the other is the next one.
        right_weight: (...) in 0..1, the weight of the bin on the right, that on the left having the remainder. A
            distance beyond the outermost bins counts as theirs.
    """
    left = (torch.searchsorted(bins, distances.contiguous(), right=True) - 1).clamp(0, len(bins) - 2)
    lower, upper = bins[left], bins[left + 1]
    return left, ((distances - lower) / (upper - lower)).clamp(0, 1)
