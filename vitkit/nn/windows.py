"""Windows of a map, shifted or not, as Swin Transformers attend in them (https://arxiv.org/abs/2103.14030).

Shapes: B batch, H x W places of a map, C channels; M windows of w x w places, N = w * w.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.nn.attention import mask_bias


class Places(NamedTuple):
    """Each place of a map is shown once, so cutting and joining are selections, and so are their gradients."""

    sources: Tensor
    """(M * N,) int64: the place of the map that each place of the windows shows; of padding 0."""
    targets: Tensor
    """(H * W,) int64: the place of the windows that shows each place of the map."""
    padding: Tensor | None
    """int64: the places of the windows that lie outside the map."""


class WindowGrid:
    """How maps of one size are cut into windows: padded at the bottom and right, then rolled up and left.

    Args:
        height: of the map, in places.
        width: of the map, in places.
        window: w.
        shift: by how many places the map is rolled.
        device: numbers the places once, to cut many maps on this device; None: anew in each `cut` and `join`.
    """

    def __init__(
        self, height: int, width: int, window: int, shift: int = 0, *, device: torch.device | str | None = None
    ):
        self.height = height
        self.width = width
        self.window = window
        self.shift = shift
        self.rows = -(-height // window)
        self.columns = -(-width // window)
        self.num_windows = self.rows * self.columns
        self.is_padded = (self.rows * window, self.columns * window) != (height, width)
        self._places = None if device is None else self._number_places(device)

    def cut(self, x: Tensor, fill: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (B, H, W, C).
            fill: (C,), the value of padding; None for zeros.
        Returns:
            (B * M, N, C).
        """
        x = _Cut.apply(x.flatten(1, 2), fill, *(self._places or self._number_places(x.device)))
        return x.view(-1, self.window**2, x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """(B * M, N, C) -> (B, H, W, C), without the padding: what undoes `cut`."""
        x = x.reshape(-1, self.num_windows * self.window**2, x.shape[-1])
        x = _Join.apply(x, *(self._places or self._number_places(x.device)))
        return x.unflatten(1, (self.height, self.width))

    def shift_bias(self, device: torch.device | None = None) -> Tensor:
        """(M, 1, N, N): hides from each place those that the shift brought from the map's other end."""

        def sides(count: int) -> Tensor:  # (count, w): 0 for all windows but the last; its two ends are 1 and 2
            place = torch.arange(count * self.window, device=device)
            side = (place >= (count - 1) * self.window).long() + (place >= count * self.window - self.shift)
            return side.view(count, self.window)

        regions = 3 * sides(self.rows)[:, None, :, None] + sides(self.columns)[None, :, None, :]
        regions = regions.view(self.num_windows, 1, self.window**2)
        return mask_bias(regions[..., :, None] != regions[..., None, :])

    def _number_places(self, device: torch.device | str) -> Places:
        tall, wide, shift = self.rows * self.window, self.columns * self.window, self.shift
        places = torch.arange(self.height * self.width, device=device).view(self.height, self.width)
        places = F.pad(places, (0, wide - self.width, 0, tall - self.height)).roll((-shift, -shift), (0, 1))
        sources = places.view(self.rows, self.window, self.columns, self.window).transpose(1, 2)

        places = torch.arange(tall * wide, device=device).view(self.rows, self.columns, self.window, self.window)
        targets = places.transpose(1, 2).reshape(tall, wide).roll((shift, shift), (0, 1))
        padding = torch.cat([targets[: self.height, self.width :].flatten(), targets[self.height :].flatten()])
        return Places(
            sources.flatten(), targets[: self.height, : self.width].flatten(), padding if len(padding) else None
        )


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fill: Tensor | None, sources: Tensor, targets: Tensor, padding: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(fill, targets, padding)
        x = x.index_select(1, sources)
        if padding is not None:
            x[:, padding] = 0 if fill is None else fill.to(x.dtype)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        fill, targets, padding = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            fill = torch.zeros_like(fill) if padding is None else grad[:, padding].sum((0, 1), dtype=fill.dtype)
        return grad.index_select(1, targets), fill, None, None, None


class _Join(torch.autograd.Function):
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


def relative_places(window: int, device: torch.device | None = None) -> Tensor:
    """(N, N) int64: the row of a table of (2 * window - 1)**2 offsets that belongs to each query and key."""
    place = torch.arange(window, device=device)
    offset = place[:, None] - place + window - 1
    return (offset[:, None, :, None] * (2 * window - 1) + offset[None, :, None, :]).view(window**2, window**2)
