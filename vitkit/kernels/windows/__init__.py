"""Window partition and its inverse, as in Swin Transformers (Liu et al. 2021, https://arxiv.org/abs/2103.14030).

`plain.py` is the definition: pad, roll, reshape. It also runs in exports, in compiled models and on a GPU. On a CPU
`gather.py`, the same as a single indexing operation, is faster; on an H100 the definition is (Swin-T and Swin V2-T in
bf16, 224x224 to 800x1344: 0.73 to 0.85 of the time in inference, 0.83 to 0.94 in training).

Shapes: B batch, H x W pixels of a map, C channels; M windows of w x w pixels, N = w * w.
"""

from types import ModuleType

from torch import Tensor

from vitkit.kernels import is_traced, plain_only
from vitkit.kernels.windows import gather, plain


def window_partition(x: Tensor, window: int, *, shift: int = 0, padding_value: Tensor | None = None) -> Tensor:
    """Partition maps into windows: pad at the bottom and right to complete windows, then roll up and left.

    Args:
        x: (B, H, W, C).
        window: w.
        shift: number of pixels by which the maps are rolled.
        padding_value: (C,); None for zeros.
    Returns:
        (B * M, N, C).
    """
    return _kernel(x).window_partition(x, window, shift, padding_value)


def window_reverse(windows: Tensor, window: int, size: tuple[int, int], *, shift: int = 0) -> Tensor:
    """Undo `window_partition`, without the padding.

    Args:
        windows: (B * M, N, C).
        window: w.
        size: (H, W).
        shift: number of pixels by which the maps were rolled.
    Returns:
        (B, H, W, C).
    """
    return _kernel(windows).window_reverse(windows, window, size, shift)


def _kernel(x: Tensor) -> ModuleType:
    return plain if x.device.type != "cpu" or is_traced() or plain_only() else gather
