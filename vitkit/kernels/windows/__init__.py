"""Window partition and its reverse, as Swin Transformers cut maps (Liu et al. 2021, https://arxiv.org/abs/2103.14030).

`plain.py` is the definition: pad, roll, reshape. `gather.py` does the same as one selection, on any
device; compilers and exports get the definition.

Shapes: B batch, H x W pixels of a map, C channels; M windows of w x w pixels, N = w * w.
"""

from torch import Tensor

from vitkit.kernels import is_traced, plain_only
from vitkit.kernels.windows import gather, plain


def window_partition(x: Tensor, window: int, *, shift: int = 0, padding_value: Tensor | None = None) -> Tensor:
    """Cut maps into windows, padded at the bottom and right to whole windows, then rolled up and left.

    Args:
        x: (B, H, W, C).
        window: w.
        shift: by how many pixels the maps are rolled.
        padding_value: (C,); None for zeros.
    Returns:
        (B * M, N, C).
    """
    kernel = plain if is_traced() or plain_only() else gather
    return kernel.window_partition(x, window, shift, padding_value)


def window_reverse(windows: Tensor, window: int, size: tuple[int, int], *, shift: int = 0) -> Tensor:
    """Undo `window_partition`, without the padding.

    Args:
        windows: (B * M, N, C).
        window: w.
        size: (H, W).
        shift: by how many pixels the maps were rolled.
    Returns:
        (B, H, W, C).
    """
    kernel = plain if is_traced() or plain_only() else gather
    return kernel.window_reverse(windows, window, size, shift)
