"""The definition of window partition and its inverse: pad, roll, reshape."""

import torch.nn.functional as F
from torch import Tensor


def window_partition(x: Tensor, window: int, shift: int = 0, padding_value: Tensor | None = None) -> Tensor:
    """Partition the map into windows by reshaping."""
    batch_size, height, width, channels = x.shape
    rows, columns = num_windows(height, window), num_windows(width, window)
    down, right = rows * window - height, columns * window - width
    if down or right:
        x = F.pad(x, (0, 0, 0, right, 0, down))
        if padding_value is not None:
            inside = F.pad(x.new_ones(height, width, 1), (0, 0, 0, right, 0, down)) > 0
            x = x.where(inside, padding_value.to(x.dtype))
    if shift:
        x = x.roll((-shift, -shift), (1, 2))
    x = x.reshape(batch_size, rows, window, columns, window, channels)
    return x.transpose(2, 3).reshape(batch_size * rows * columns, window**2, channels)


def window_reverse(windows: Tensor, window: int, size: tuple[int, int], shift: int = 0) -> Tensor:
    """Put the windows back together by reshaping."""
    height, width = size
    rows, columns = num_windows(height, window), num_windows(width, window)
    x = windows.reshape(-1, rows, columns, window, window, windows.shape[-1])
    x = x.transpose(2, 3).reshape(-1, rows * window, columns * window, windows.shape[-1])
    if shift:
        x = x.roll((shift, shift), (1, 2))
    return x[:, :height, :width]


def num_windows(length: int, window: int) -> int:
    """Return the number of windows that cover a length."""
    # Exporters round quotients of negative numbers up.
    return (length + window - 1) // window
