"""Position codes."""

import math

import torch
from torch import Tensor


def sine_positions_1d(length: int, d_model: int, *, temperature: float = 10000.0, device=None) -> Tensor:
    """Sines and cosines of the position (Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762).

    Returns:
        (length, d_model) float32; even channels are sines, odd ones cosines of the same frequency.
    """
    return _sines(torch.arange(length, dtype=torch.float32, device=device), d_model, temperature)


def sine_positions_2d(
    size: tuple[int, int],
    d_model: int,
    *,
    padding_mask: Tensor | None = None,
    offset: float = 0.0,
    temperature: float = 10000.0,
    device=None,
) -> Tensor:
    """DETR's code of a map's places (Carion et al. 2020, appendix A.4, https://arxiv.org/abs/2005.12872).

    Row and column, counted from 1 over the un-padded places and divided by the last of them, become angles in
    0..2 pi; the first half of the channels codes the row, the second half the column.

    Args:
        size: (H, W) of the map.
        d_model: channels, a multiple of 4.
        padding_mask: (B, H, W) bool, True = padding.
        offset: added to row and column before the division (Deformable DETR: -0.5).
    Returns:
        (B, H, W, d_model) float32; B is 1 without a mask.
    """
    if padding_mask is None:
        y = torch.arange(1, size[0] + 1, dtype=torch.float32, device=device)[None, :, None]
        x = torch.arange(1, size[1] + 1, dtype=torch.float32, device=device)[None, None, :]
    else:
        free = ~padding_mask
        y = free.cumsum(1, dtype=torch.float32)
        x = free.cumsum(2, dtype=torch.float32)
    codes = [
        _sines((places + offset) / (last + 1e-6) * (2 * math.pi), d_model // 2, temperature)
        for places, last in ((y, y[:, -1:, :]), (x, x[:, :, -1:]))
    ]
    return torch.cat([code.expand(-1, *size, -1) for code in codes], dim=-1)


def _sines(angles: Tensor, channels: int, temperature: float) -> Tensor:
    """(...) -> (..., channels): sine and cosine, interleaved, at channels / 2 falling frequencies."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=angles.device) / channels
    angles = angles[..., None] / temperature**exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
