"""Masks and position indices for attention in windows (Liu et al. 2021, https://arxiv.org/abs/2103.14030)."""

import torch
from torch import Tensor

from vitkit.nn.attention import mask_bias


def shift_bias(size: tuple[int, int], window: int, shift: int, *, device: torch.device | None = None) -> Tensor:
    """Return the bias that masks, in shifted windows, pixels that the shift moved from the opposite side of the map.

    Args:
        size: (H, W) of the map.
    Returns:
        (M, 1, N, N) for M windows of N = window**2 pixels.
    """

    def regions(length: int) -> Tensor:  # (windows, window): 0 in all windows but the last, whose two parts are 1 and 2
        count = (length + window - 1) // window  # exporters round quotients of negative numbers up
        pixel = torch.arange(count * window, device=device)
        region = (pixel >= (count - 1) * window).long() + (pixel >= count * window - shift)
        return region.view(count, window)

    rows, columns = regions(size[0]), regions(size[1])
    region = (3 * rows[:, None, :, None] + columns[None, :, None, :]).view(-1, 1, window**2)
    return mask_bias(region[..., :, None] != region[..., None, :])


def relative_position_index(window: int, device: torch.device | None = None) -> Tensor:
    """Return the row in a table of (2 * window - 1)**2 offsets for each query and key, (N, N) int64."""
    pixel = torch.arange(window, device=device)
    offset = pixel[:, None] - pixel + window - 1
    return (offset[:, None, :, None] * (2 * window - 1) + offset[None, :, None, :]).view(window**2, window**2)
