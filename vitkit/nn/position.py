"""Position encodings by sines and cosines."""

import math

import torch
from torch import Tensor


def sine_positions_1d(length: int, d_model: int) -> Tensor:
    """Return sines and cosines of the position (Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762).

    Returns:
        (length, d_model) float32; even channels are sines, odd ones cosines of the same frequency.
    """
    return _sines(torch.arange(length, dtype=torch.float32), d_model)


def fairseq_positions_1d(length: int, d_model: int) -> Tensor:
    """Return fairseq's sines and cosines of the position, used by published translation models.

    Positions count from 2; frequencies fall from 1 to exactly 1e-4.

    Returns:
        (length, d_model) float32; the first half of the channels are sines, the second cosines of the same frequencies.
    """
    half = d_model // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float32) / max(half - 1, 1))
    # fairseq reserves the first two positions for padding.
    angles = torch.arange(2, length + 2, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def sine_positions_2d(
    size: tuple[int, int],
    d_model: int,
    *,
    padding_mask: Tensor | None = None,
    offset: float = 0.0,
    temperature: float = 10000.0,
    device=None,
) -> Tensor:
    """Return DETR's encoding of a map's locations (Carion et al. 2020, appendix A.4, https://arxiv.org/abs/2005.12872).

    Row and column numbers, counted from 1 over the unpadded locations and divided by the last one, become angles in
    0..2 pi; the first half of the channels encodes the row, the second half the column.

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
        inside = ~padding_mask
        y = inside.cumsum(1, dtype=torch.float32)
        x = inside.cumsum(2, dtype=torch.float32)
    encodings = [
        _sines((location + offset) / (last + 1e-6) * (2 * math.pi), d_model // 2, temperature)
        for location, last in ((y, y[:, -1:, :]), (x, x[:, :, -1:]))
    ]
    return torch.cat([encoding.expand(-1, *size, -1) for encoding in encodings], dim=-1)


def sine_positions_grid(
    size: tuple[int, int], d_model: int, *, dtype: torch.dtype = torch.float32, device=None
) -> Tensor:
    """Return RT-DETR's encoding of a map's locations (Zhao et al. 2023, https://arxiv.org/abs/2304.08069).

    Row and column numbers from 0 are the angles. The quarters of the channels are sines and cosines of the row, then
    of the column, at d_model / 4 decreasing frequencies.

    Returns:
        (H * W, d_model) of `dtype`, row by row.
    """
    quarter = d_model // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, dtype=dtype, device=device) / quarter)
    rows, columns = (torch.arange(n, dtype=dtype, device=device)[:, None] * frequencies for n in size)
    # An ONNX file would lose repeat_interleave's or repeat's factor for maps of another size than the traced one.
    rows = rows[:, None].expand(-1, size[1], -1).flatten(0, 1)
    columns = columns[None].expand(size[0], -1, -1).flatten(0, 1)
    return torch.cat((rows.sin(), rows.cos(), columns.sin(), columns.cos()), dim=1)


def sine_positions_boxes(boxes: Tensor, d_model: int) -> Tensor:
    """Return the encoding of boxes or points (Zhu et al. 2021, appendix A.4, https://arxiv.org/abs/2010.04159).

    Args:
        boxes: (..., 4) boxes or (..., 2) points in 0..1.
        d_model: number of channels for two of the numbers, a multiple of 4.
    Returns:
        (..., 2 * d_model) float32 for boxes, (..., d_model) for points: the encodings of the numbers concatenated, in
        their order. `sine_positions_2d` encodes (y, x).
    """
    return _sines(boxes.float() * (2 * math.pi), d_model // 2).flatten(-2)


def _sines(angles: Tensor, channels: int, temperature: float = 10000.0) -> Tensor:
    """Encode (...) as (..., channels): sine and cosine, interleaved, at channels / 2 decreasing frequencies."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=angles.device) / channels
    angles = angles[..., None] / temperature**exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
