"""Local relation without materializing windows: a product with one shifted map for each location of the window.

Shapes: N maps, one for each image and group of channels that share weights, (H, W) the map, (h, w) the output, k the
side of the window, n = k * k.

A map is padded and its rows are consecutive in memory, so that the inputs of all outputs for one location of the window
are a single slice: (N, C, h * columns), where each row of outputs ends with filler.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.kernels.local_relation.plain import OUTSIDE

# exp(OUTSIDE) is below the smallest normal float, and processors are slow with such numbers.
_MIN_SCORE = -70.0
"""Scores that are this far below the score of the window's center, or further, get no weight."""


class Layout(NamedTuple):
    """Memory layout of a padded map: `stride` * `stride` phases, each with every stride-th row and column."""

    height: int
    width: int
    side: int
    stride: int
    dilation: int

    @property
    def out_size(self) -> tuple[int, int]:
        """The height and width of the output, (h, w)."""
        return -(-self.height // self.stride), -(-self.width // self.stride)

    @property
    def phase_size(self) -> tuple[int, int]:
        """Numbers of rows and columns of a phase; the last windows' slices extend beyond the last row needed."""
        reach = -(-self.dilation * (self.side - 1) // self.stride)
        return self.out_size[0] + reach + 1, self.out_size[1] + reach

    @property
    def length(self) -> int:
        """The length of a slice, h * columns."""
        return self.out_size[0] * self.phase_size[1]

    def pad(self, x: Tensor) -> Tensor:
        """Pad a map and split it into phases: (N, C, H, W) -> (N, C, phases, rows * columns)."""
        margin, (rows, columns) = self.dilation * (self.side // 2), self.phase_size
        right, bottom = columns * self.stride - self.width - margin, rows * self.stride - self.height - margin
        x = F.pixel_unshuffle(F.pad(x.contiguous(), (margin, right, margin, bottom)), self.stride)
        return x.unflatten(1, (-1, self.stride**2)).flatten(3)

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse of `pad`."""
        x = F.pixel_shuffle(x.unflatten(3, self.phase_size).flatten(1, 2), self.stride)
        margin = self.dilation * (self.side // 2)
        return x[:, :, margin : margin + self.height, margin : margin + self.width]

    def pad_outputs(self, x: Tensor) -> Tensor:
        """Add filler to each row of outputs: (..., h, w) -> (..., h * columns)."""
        return F.pad(x.contiguous(), (0, self.phase_size[1] - self.out_size[1])).flatten(-2)

    def unpad_outputs(self, x: Tensor) -> Tensor:
        """The inverse of `pad_outputs`."""
        height, width = self.out_size
        return x.unflatten(-1, (height, -1))[..., :width].contiguous()

    def shifts(self, padded: Tensor) -> Iterator[Tensor]:
        """Yield the slice of a padded map for each location of the window: n views (N, C, h * columns)."""
        steps = [divmod(self.dilation * i, self.stride) for i in range(self.side)]
        for (row, row_phase), (column, column_phase) in itertools.product(steps, steps):
            start = row * self.phase_size[1] + column
            yield padded[:, :, row_phase * self.stride + column_phase, start : start + self.length]

    def windows(self, padded: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """Yield the same as few large views, which overlap and so must not be written to.

        Each is preceded by its rows and columns of the window; views are (N, C, rows, columns, h * columns).
        """
        # Every `period`-th row or column of the window is in the same phase, `step` rows or columns further on.
        period = self.stride // math.gcd(self.stride, self.dilation)
        step = self.dilation * period // self.stride
        columns = self.phase_size[1]
        for i, j in itertools.product(range(min(period, self.side)), repeat=2):
            (row, row_phase), (column, column_phase) = (divmod(self.dilation * x, self.stride) for x in (i, j))
            phase = padded[:, :, row_phase * self.stride + column_phase]
            counts = [len(range(x, self.side, period)) for x in (i, j)]
            view = phase.as_strided(
                (*phase.shape[:2], *counts, self.length),
                (*phase.stride()[:2], step * columns, step, 1),
                phase.storage_offset() + row * columns + column,
            )
            yield (slice(i, None, period), slice(j, None, period)), view

    def as_window(self, weights: Tensor) -> Tensor:
        """Reshape (N, n, h * columns) to (N, k, k, h * columns)."""
        return weights.unflatten(1, (self.side, self.side))


class ProductWeights(torch.autograd.Function):
    """The softmax, over each output's window, of the product of query and key plus the geometry prior.

    (N, c, h, w), (N, c, H, W), (N, k, k) -> (N, n, h * columns).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, prior: Tensor, stride: int, dilation: int) -> Tensor:
        """Return the weights, accumulated channel by channel with one shifted map per window location."""
        layout = Layout(*key.shape[2:], prior.shape[-1], stride, dilation)
        queries, keys = layout.pad_outputs(query), layout.pad(key)
        outside = OUTSIDE * (1 - layout.pad(torch.ones_like(key[:1, :1])))
        weights = query.new_empty(len(key), layout.side**2, layout.length)
        scores = layout.as_window(weights)
        for ((rows, columns), shifted_keys), (_, shifted_outside) in zip(layout.windows(keys), layout.windows(outside)):
            part = torch.add(prior[:, rows, columns, None], shifted_outside[:, 0], out=scores[:, rows, columns])
            for q, k in zip(queries.unbind(1), shifted_keys.unbind(1)):
                part.addcmul_(q[:, None, None], k)
        # Subtracting 70 from a score of millions would not change it, but then no other score has any weight anyway.
        least = (weights[:, layout.side**2 // 2, None] + _MIN_SCORE).clamp_(max=1e6)
        torch.softmax(torch.maximum(weights, least, out=weights), dim=1, out=weights)
        F.threshold_(weights, math.exp(_MIN_SCORE + 1), 0.0)
        ctx.save_for_backward(weights, query, key)
        ctx.layout = layout
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and prior."""
        weights, query, key = ctx.saved_tensors
        layout = ctx.layout
        queries, keys = layout.pad_outputs(query), layout.pad(key)
        grad_queries, grad_keys = torch.zeros_like(queries), torch.zeros_like(keys)
        grad_scores = grad * weights
        grad_scores.addcmul_(weights, grad_scores.sum(1, keepdim=True), value=-1)
        for grad_score, k, grad_k in zip(grad_scores.unbind(1), layout.shifts(keys), layout.shifts(grad_keys)):
            grad_queries.addcmul_(grad_score[:, None], k)
            grad_k.addcmul_(grad_score[:, None], queries)
        grad_prior = layout.as_window(grad_scores).sum(3)
        return layout.unpad_outputs(grad_queries), layout.unpad(grad_keys), grad_prior, None, None


class WindowSum(torch.autograd.Function):
    """The weighted sum of each output's window: (N, n, h * columns), (N, C, H, W) -> (N, C, h, w)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, stride: int, dilation: int) -> Tensor:
        """Return the weighted sums, accumulated over the locations of the window."""
        layout = Layout(*value.shape[2:], int(weights.shape[1] ** 0.5), stride, dilation)
        output = value.new_zeros(*value.shape[:2], layout.length)
        for weight, values in zip(weights.unbind(1), layout.shifts(layout.pad(value))):
            output.addcmul_(weight[:, None], values)
        ctx.save_for_backward(weights, value)
        ctx.layout = layout
        return layout.unpad_outputs(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of weights and values."""
        weights, value = ctx.saved_tensors
        layout = ctx.layout
        grads, values = layout.pad_outputs(grad), layout.pad(value)
        grad_weights, grad_values = torch.empty_like(weights), torch.zeros_like(values)
        for (rows, columns), shifted_values in layout.windows(values):
            part = layout.as_window(grad_weights)[:, rows, columns].zero_()
            for channel_grad, channel_values in zip(grads.unbind(1), shifted_values.unbind(1)):
                part.addcmul_(channel_grad[:, None, None], channel_values)
        for weight, shifted_grad in zip(weights.unbind(1), layout.shifts(grad_values)):
            shifted_grad.addcmul_(weight[:, None], grads)
        return grad_weights, layout.unpad(grad_values), None, None
