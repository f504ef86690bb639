"""The definition of deformable attention's sampled sum, in basic PyTorch operators."""

from collections.abc import Sequence

import torch
from torch import Tensor


def deformable_attend(
    values: Tensor,
    shapes: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    weights: Tensor,
    levels: Sequence[int] | None = None,
) -> Tensor:
    """Sum weighted bilinear samples, group by group and corner by corner; see the package's `deformable_attend`.

    It is equivalent to `grid_sample` for each level, but gathering has a deterministic gradient on a GPU.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    locations, weights = sampling_locations.to(dtype), weights.to(dtype)
    maps = values.to(dtype).split([height * width for height, width in shapes], dim=1)
    batch_size, _, heads, channels = values.shape
    image = torch.arange(batch_size, device=values.device)[:, None, None, None]
    head = torch.arange(heads, device=values.device)[:, None]
    output = values.new_zeros(batch_size, weights.shape[1], heads, channels, dtype=dtype)
    for group, level in enumerate(range(len(shapes)) if levels is None else levels):
        height, width = shapes[level]
        # The center of the first pixel is at half a pixel.
        x = locations[:, :, :, group, :, 0] * width - 0.5
        y = locations[:, :, :, group, :, 1] * height - 0.5
        left, top = x.floor(), y.floor()
        for row, row_share in ((top, 1 - (y - top)), (top + 1, y - top)):
            for column, column_share in ((left, 1 - (x - left)), (left + 1, x - left)):
                outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
                share = (weights[:, :, :, group] * row_share * column_share).masked_fill(outside, 0)
                # Clamped after the conversion, which turns nan into an arbitrary integer.
                pixel = row.long().clamp(0, height - 1) * width + column.long().clamp(0, width - 1)
                pixels = maps[level][image, pixel, head]  # (B, L, heads, points, d)
                output = output + torch.einsum("blhp,blhpd->blhd", share, pixels)
    return output.flatten(2).to(values.dtype)
