"""Positions of vision transformers: MAE's fixed ones, rotations, and learned ones resized to other maps."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.nn.position import sine_positions_grid


def mae_positions(grid: tuple[int, int], d_model: int, *, num_others: int = 1) -> Tensor:
    """Return MAE's fixed positions of a grid of patches (He et al. 2021, https://arxiv.org/abs/2111.06377).

    They are those of `sine_positions_grid`, but the first half of the channels encodes the column, the second the row.

    Args:
        num_others: number of tokens before the patches, such as the class token, whose positions are zero.
    Returns:
        (1, num_others + h * w, d_model) float32.
    """
    # In double precision, as the original computes the tables that its weights contain.
    rows_first = sine_positions_grid(grid, d_model, dtype=torch.float64).float()
    return F.pad(rows_first.roll(d_model // 2, dims=1), (0, 0, num_others, 0))[None]


def rotary_positions_2d(size: tuple[int, int], channels: int, *, scale: float | Tensor = 1.0, device=None) -> Tensor:
    """Return DINOv3's rotations for a map's locations (Simeoni et al. 2025, section 3.2,
    https://arxiv.org/abs/2508.10104; rotary positions: Su et al. 2021, https://arxiv.org/abs/2104.09864).

    Row and column of each location's center, from -1 to 1 over the map, rotate pairs of channels at decreasing
    frequencies: the first quarter of the channels by the row, the next by the column; the second half holds the
    partners of the first.

    Args:
        size: (H, W) of the map.
        channels: number of channels of a head, a multiple of 4.
        scale: factor on the coordinates.
    Returns:
        (2, H * W, channels) float32, cosines and sines, for `rotate`.
    """
    y, x = ((torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n * 2 - 1 for n in size)
    centers = torch.cartesian_prod(y, x) * scale  # (H * W, 2)
    exponents = torch.arange(0, channels, 4, dtype=torch.float32, device=device) / channels
    angles = (2 * math.pi * centers[:, :, None] / 100.0**exponents).flatten(1).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def pad_rotations(rotations: Tensor | None, count: int) -> Tensor | None:
    """Insert `count` tokens without rotation before the others: (2, L, channels) -> (2, count + L, channels)."""
    if rotations is None:
        return None
    unrotated = rotations.new_zeros(2, count, rotations.shape[2])
    unrotated[0] = 1
    return torch.cat((unrotated, rotations), dim=1)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each channel of the first half together with its partner in the second half.

    Args:
        x: (..., L, channels).
        rotations: (2, L, channels), cosines and sines, from `rotary_positions_2d`.
    """
    cosines, sines = rotations
    x1, x2 = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-x2, x1), dim=-1) * sines).to(x.dtype)


def resize_positions_1d(table: Tensor, length: int) -> Tensor:
    """Resize the position embeddings of one axis linearly: (rows, d) -> (length, d)."""
    if len(table) == length:
        return table
    return F.interpolate(table.mT[None], size=length, mode="linear")[0].mT


def resize_positions_2d(
    table: Tensor,
    grid: tuple[int, ...],
    size: tuple[int, ...],
    *,
    mode: str = "bicubic",
    antialias: bool = False,
    offset: float = 0.0,
) -> Tensor:
    """Resize the position embeddings of a grid to another grid.

    Args:
        table: (1, h * w, C) for the grid (h, w).
        size: (H, W), the new grid.
        mode, antialias: arguments of `torch.nn.functional.interpolate`.
        offset: resize, bicubically and without antialiasing, as if the new grid had this fraction of a row and column
            more (DINO: 0.1); 0: as `mode` and `antialias` say.
    Returns:
        (1, H * W, C).
    """
    if grid == size:
        return table
    maps = table.to(torch.promote_types(table.dtype, torch.float32)).mT.unflatten(2, grid)
    if offset:
        rows, columns = (_cubic_weights(old, new, offset, maps.device) for old, new in zip(grid, size))
        resized = rows.to(maps.dtype) @ maps @ columns.to(maps.dtype).mT
    else:
        resized = F.interpolate(maps, size=size, mode=mode, antialias=antialias)
    return resized.flatten(2).mT.to(table.dtype)


def _cubic_weights(old: int, new: int, offset: float, device: torch.device) -> Tensor:
    """Return the weights, (new, old) float32, of bicubic interpolation without antialiasing as `torch.nn.functional`'s,
    by the factor (new + offset) / old.

    That takes factors which are not the quotient of the sizes, but a graph that is exported for any size cannot.
    """
    places = (torch.arange(new, dtype=torch.float32, device=device) + 0.5) * (old / (new + offset)) - 0.5
    cells = torch.arange(-2, old + 2, device=device)  # two beyond each border, where the outermost are repeated
    x = (places[:, None] - cells).abs()
    near = (1.25 * x - 2.25) * x * x + 1
    far = ((-0.75 * x + 3.75) * x - 6) * x + 3
    weights = torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))
    return weights @ F.one_hot(cells.clamp(0, old - 1), old).to(weights.dtype)
