"""The definition of deformable attention's sampled sum, in basic PyTorch operators."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


def deformable_attend(
    values: Tensor,
    shapes: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    weights: Tensor,
    levels: Sequence[int] | None = None,
) -> Tensor:
    """Sum weighted bilinear samples, group by group; see the package's `deformable_attend`.

    It is equivalent to `grid_sample` for each level, but also runs in exports that have no `grid_sample`, and gathering
    has a deterministic gradient on a GPU. A group is one gathering of rows and one matrix product: in ONNX Runtime on a
    CPU, D-FINE-N's file takes 0.92 of the time that it takes with one of each for every corner of a pixel's cell.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    locations, weights = sampling_locations.to(dtype), weights.to(dtype)
    batch_size, area, heads, _ = values.shape
    table = values.to(dtype).flatten(0, 2)  # a row for each image, location and head
    first_rows = area * torch.arange(batch_size, device=values.device).view(-1, 1, 1, 1, 1, 1)
    head = torch.arange(heads, device=values.device).view(-1, 1, 1, 1)
    first_pixels = list(accumulate((height * width for height, width in shapes), initial=0))
    sums = []
    for group, level in enumerate(range(len(shapes)) if levels is None else levels):
        height, width = shapes[level]
        x, y = locations[:, :, :, group].unbind(-1)
        columns, column_shares = _neighbors(x, width)  # (B, L, heads, 2, points)
        rows, row_shares = _neighbors(y, height)
        pixels = rows[..., :, None, :] * width + columns[..., None, :, :] + (first_rows + first_pixels[level])
        index = (pixels * heads + head).flatten(3)  # (B, L, heads, 4 * points)
        shares = row_shares[..., :, None, :] * column_shares[..., None, :, :]
        shares = (shares * weights[:, :, :, group, None, None]).flatten(3)
        sums.append(shares[..., None, :] @ F.embedding(index, table))  # (B, L, heads, 1, d)
    return sum(sums).flatten(2).to(values.dtype)


def _neighbors(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the two pixels beside coordinates (..., points) in 0..1 of a row of pixels, and their shares of each.

    Returns:
        indices: (..., 2, points) int64, clamped to the row.
        shares: (..., 2, points), 0 for a pixel outside.
    """
    x = x * size - 0.5  # the center of the first pixel is at half a pixel
    first = x.floor()
    share = x - first
    pixels = torch.stack((first, first + 1), dim=-2)
    shares = torch.stack((1 - share, share), dim=-2).masked_fill((pixels < 0) | (pixels >= size), 0)
    # Clamped after the conversion, which turns nan into an arbitrary integer.
    return pixels.long().clamp(0, size - 1), shares
