"""Window partition and its inverse as one indexing operation each, whose gradients are also indexing operations.

With it, Swin-T (480x640, batch 1) takes 0.81 of the plain form's time in inference and 0.93 in a training step; without
padding (224x224, batch 2) inference takes 0.99. Measured on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def window_partition(x: Tensor, window: int, shift: int = 0, padding_value: Tensor | None = None) -> Tensor:
    """Gather the pixels of each window."""
    height, width = x.shape[1:3]
    x = _Partition.apply(x.flatten(1, 2), padding_value, *_indices(height, width, window, shift, x.device))
    return x.view(-1, window**2, x.shape[-1])


def window_reverse(windows: Tensor, window: int, size: tuple[int, int], shift: int = 0) -> Tensor:
    """Gather the pixels of the map."""
    height, width = size
    sources, targets, padding = _indices(height, width, window, shift, windows.device)
    x = _Reverse.apply(windows.reshape(-1, len(sources), windows.shape[-1]), sources, targets, padding)
    return x.unflatten(1, size)


def _indices(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Number the pixels of a map and of its windows.

    Returns:
        sources: (M * N,) int64, for each pixel of the windows its pixel in the map; 0 for padding.
        targets: (H * W,) int64, for each pixel of the map its pixel in the windows.
        padding: int64, pixels of the windows that are outside the map; None if there are none.
    """
    rows, columns = -(-height // window), -(-width // window)
    padded_height, padded_width = rows * window, columns * window
    pixels = torch.arange(height * width, device=device).view(height, width)
    pixels = F.pad(pixels, (0, padded_width - width, 0, padded_height - height)).roll((-shift, -shift), (0, 1))
    sources = pixels.view(rows, window, columns, window).transpose(1, 2).flatten()

    pixels = torch.arange(len(sources), device=device).view(rows, columns, window, window).transpose(1, 2)
    pixels = pixels.reshape(padded_height, padded_width).roll((shift, shift), (0, 1))
    targets = pixels[:height, :width].flatten()
    if len(sources) == len(targets):
        return sources, targets, None
    return sources, targets, torch.cat((pixels[:height, width:].flatten(), pixels[height:].flatten()))


# Every pixel is in exactly one window, so the gradients are indexing operations, whereas PyTorch's would add up values.
class _Partition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, padding_value: Tensor | None, sources: Tensor, targets: Tensor, padding: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(padding_value, targets, padding)
        x = x.index_select(1, sources)
        if padding is not None:
            x[:, padding] = 0 if padding_value is None else padding_value.to(x.dtype)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, targets, padding = ctx.saved_tensors
        grad_value = None
        if ctx.needs_input_grad[1]:
            grad_value = torch.zeros_like(value) if padding is None else grad[:, padding].sum((0, 1), dtype=value.dtype)
        return grad.index_select(1, targets), grad_value, None, None, None


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, targets: Tensor, padding: Tensor | None) -> Tensor:
        ctx.save_for_backward(sources, padding)
        return x.index_select(1, targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sources, padding = ctx.saved_tensors
        grad = grad.index_select(1, sources)
        if padding is not None:
            grad[:, padding] = 0
        return grad, None, None, None
