"""Position codes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
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


def sine_positions_boxes(boxes: Tensor, d_model: int, *, temperature: float = 10000.0) -> Tensor:
    """The code of a box (Zhu et al. 2021, appendix A.4, https://arxiv.org/abs/2010.04159).

    Args:
        boxes: (..., 4) in 0..1.
        d_model: channels for two of the four numbers, a multiple of 4.
    Returns:
        (..., 2 * d_model) float32, number after number.
    """
    return _sines(boxes.float() * (2 * math.pi), d_model // 2, temperature).flatten(-2)


def _sines(angles: Tensor, channels: int, temperature: float) -> Tensor:
    """(...) -> (..., channels): sine and cosine, interleaved, at channels / 2 falling frequencies."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=angles.device) / channels
    angles = angles[..., None] / temperature**exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def decomposed_positions(
    q: Tensor, tables: Sequence[Tensor], q_size: tuple[int, ...], k_size: tuple[int, ...]
) -> Tensor:
    """Relative positions as a sum over the axes (Li et al. 2022, section 4.1, https://arxiv.org/abs/2112.01526).

    Args:
        q: (B, heads, L, d), not scaled; L places of a map or clip.
        tables: for each axis (2 * length - 1, d), the code of each distance; other lengths are resized.
        q_size: lengths of the queries' axes.
        k_size: lengths of the keys' axes.
    Returns:
        (B, heads, L, S), the bias q . R_h[dy] + q . R_w[dx] (+ q . R_t[dt]).
    """
    axes = len(q_size)
    q = q.unflatten(2, q_size)
    bias = None
    for axis, table in enumerate(tables):
        rows = relative_rows(table, q_size[axis], k_size[axis])
        # The axis becomes the last of the batch, so that each of its places meets its own rows.
        part = (q.movedim(2 + axis, -3) @ rows.mT).movedim(-3, 2 + axis)
        part = part.reshape(*part.shape[:-1], *(k_size[i] if i == axis else 1 for i in range(axes)))
        bias = part if bias is None else bias + part
    return bias.flatten(-axes).flatten(2, 1 + axes)


def relative_rows(table: Tensor, q_length: int, k_length: int) -> Tensor:
    """(rows, d) -> (q_length, k_length, d): the row of each query and key along one axis.

    The places of the shorter side are spread over the longer one; distances are truncated to whole rows.
    """
    table = resize_table(table, 2 * max(q_length, k_length) - 1)
    q_step, k_step = max(k_length / q_length, 1.0), max(q_length / k_length, 1.0)
    q_places = torch.arange(q_length, device=table.device)[:, None] * q_step
    k_places = torch.arange(k_length, device=table.device) * k_step
    return table[(q_places - k_places + (k_length - 1) * k_step).long()]


def resize_table(table: Tensor, length: int) -> Tensor:
    """(rows, d) -> (length, d), interpolated linearly."""
    if len(table) == length:
        return table
    return F.interpolate(table.mT[None], size=length, mode="linear")[0].mT
