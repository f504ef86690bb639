"""The definition of window partition and its reverse: pad, roll, reshape."""

import torch.nn.functional as F
from torch import Tensor


def window_partition(x: Tensor, window: int, shift: int = 0, padding_value: Tensor | None = None) -> Tensor:
    """Cut the map into windows by reshaping."""
    height, width = x.shape[1:3]
    down, right = -height % window, -width % window
    if down or right:
        value = x.new_zeros(()) if padding_value is None else padding_value.to(x.dtype)
        inside = F.pad(x.new_ones(height, width, 1), (0, 0, 0, right, 0, down)) > 0
        x = F.pad(x, (0, 0, 0, right, 0, down)).where(inside, value)
    x = x.roll((-shift, -shift), (1, 2))
    x = x.unflatten(2, (-1, window)).unflatten(1, (-1, window))  # (B, rows, w, columns, w, C)
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def window_reverse(windows: Tensor, window: int, size: tuple[int, int], shift: int = 0) -> Tensor:
    """Put the windows together by reshaping."""
    height, width = size
    rows, columns = (height + window - 1) // window, (width + window - 1) // window
    x = windows.unflatten(1, (window, window)).unflatten(0, (-1, rows, columns))
    x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # (B, rows * w, columns * w, C)
    return x.roll((shift, shift), (1, 2))[:, :height, :width]
