"""The operators of local relation: each place's softmax over its window, and the sum of the window by such weights.

Shapes: N maps, one for each image and group of channels that share weights, (H, W) the map, (h, w) =
(ceil(H / stride), ceil(W / stride)) the output, k the side of the window, and n = k * k its places, row by row.

How it is computed: a map is padded and its rows follow each other in memory, so that the map as one place of the window
sees it, for all outputs at once, is a slice. The map is never unfolded; what is as large as the weights is made for a
few maps at a time, so that a processor's cache can hold it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from vitkit.nn.attention import attention_weights

OUTSIDE = -100.0
"""Similarity to a place outside the map. It still takes part in the softmax, with its geometry prior."""

_LEAST = -70.0
"""A place outside the map whose score is this far below the middle's, or more, has no weight."""

_PART_SIZE = 2**21
"""Weights at a time."""


class Similarity(NamedTuple):
    """The appearance term of one channel, from a query and a key."""

    value: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]
    """Derivatives by query and by key; None for 0."""

    def add_to(self, scores: Tensor, query: Tensor, key: Tensor, scale: float, out: Tensor) -> None:
        if self.value is torch.mul:  # in one step, without memory of its own
            torch.addcmul(scores, query, key, value=scale, out=out)
        else:
            torch.add(scores, self.value(query, key), alpha=scale, out=out)


def _relative_difference_gradient(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    difference, size = q - k, q.abs() + k.abs() + 1
    sign, pull = difference.sign() / size, difference.abs() / size.square()
    return pull * q.sign() - sign, pull * k.sign() + sign


def _relative_square_gradient(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    difference, product = q - k, q * k
    size = product.abs() + 1
    slope, pull = 2 * difference / size, difference.square() * product.sign() / size.square()
    return pull * k - slope, pull * q + slope


def _difference_gradient(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    sign = (q - k).sign()
    return -sign, sign


def _square_gradient(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    slope = 2 * (q - k)
    return -slope, slope


SIMILARITIES = {
    "product": Similarity(torch.mul, lambda q, k: (k, q)),
    "key": Similarity(lambda q, k: k, lambda q, k: (None, torch.ones_like(k))),
    "difference": Similarity(lambda q, k: -(q - k).abs(), _difference_gradient),
    "relative_difference": Similarity(
        lambda q, k: -(q - k).abs() / (q.abs() + k.abs() + 1), _relative_difference_gradient
    ),
    "relative_square": Similarity(lambda q, k: -(q - k).square() / ((q * k).abs() + 1), _relative_square_gradient),
    "square": Similarity(lambda q, k: -(q - k).square(), _square_gradient),
    "none": Similarity(lambda q, k: torch.zeros_like(k), lambda q, k: (None, None)),
}
"""In the order of the original's numbers 0 to 5; "none", geometry alone, is its -1. The paper compares "square",
"difference" and "product"."""


class _Layout(NamedTuple):
    """How the padded map lies in memory: `stride` * `stride` phases, each with every stride-th row and column."""

    height: int
    width: int
    out_height: int
    out_width: int
    rows: int
    columns: int
    """Of each phase, and of the outputs while they are summed: those beyond `out_width` are filler."""
    margin: int
    stride: int
    dilation: int
    kernel_size: int

    @classmethod
    def of(cls, height: int, width: int, kernel_size: int, stride: int, dilation: int) -> "_Layout":
        out_height, out_width = -(-height // stride), -(-width // stride)
        reach = -(-dilation * (kernel_size - 1) // stride)
        # The last windows' slices end some places beyond the last row they need.
        rows, columns = out_height + reach + 1, out_width + reach
        margin = dilation * (kernel_size // 2)
        return cls(height, width, out_height, out_width, rows, columns, margin, stride, dilation, kernel_size)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Phase and slice of each place of the window, for all outputs."""
        steps = [divmod(self.dilation * i, self.stride) for i in range(self.kernel_size)]
        for row, row_phase in steps:
            for column, column_phase in steps:
                start = row * self.columns + column
                yield row_phase * self.stride + column_phase, slice(start, start + self.out_height * self.columns)

    def windows(self, padded: Tensor) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
        """The same slices of a padded map (phases, ..., rows * columns), as few large views of its memory.

        Yields rows and columns of the window, and (..., those rows, those columns, out_height * columns).
        """
        # Every `period`-th row or column of the window sees the same phase, `step` places further on.
        period = self.stride // math.gcd(self.stride, self.dilation)
        step = self.dilation * period // self.stride
        firsts = range(min(period, self.kernel_size))
        for i, j in itertools.product(firsts, firsts):
            (row, row_phase), (column, column_phase) = (divmod(self.dilation * x, self.stride) for x in (i, j))
            phase = padded[row_phase * self.stride + column_phase]
            counts = [len(range(x, self.kernel_size, period)) for x in (i, j)]
            *others, last = phase.stride()
            seen = phase.as_strided(
                (*phase.shape[:-1], *counts, self.out_height * self.columns),
                (*others, step * self.columns * last, step * last, last),
                phase.storage_offset() + (row * self.columns + column) * last,
            )
            yield (slice(i, None, period), slice(j, None, period)), seen

    def outside(self) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
        """Rows and columns of the window, and of outputs, where those of the window lie beyond the map.

        Not those of the filler, whose weights are of no use.
        """
        everything = slice(None)
        for i in range(self.kernel_size):
            shift, place = self.margin - self.dilation * i, slice(i, i + 1)
            for outputs in _beyond(shift, self.height, self.stride, self.out_height):
                yield (place, everything), (outputs, everything)
            for outputs in _beyond(shift, self.width, self.stride, self.out_width):
                yield (everything, place), (everything, outputs)

    def by_place(self, x: Tensor) -> Tensor:
        """(N, n, h * columns) as (N, k, k, h, columns)."""
        return x.view(len(x), self.kernel_size, self.kernel_size, self.out_height, self.columns)

    def pad(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (phases, B, C, rows * columns)."""
        right = self.columns * self.stride - self.width - self.margin
        bottom = self.rows * self.stride - self.height - self.margin
        x = F.pad(x.contiguous(), (self.margin, right, self.margin, bottom))
        if self.stride == 1:
            return x.flatten(2)[None]
        x = x.unflatten(3, (self.columns, self.stride)).unflatten(2, (self.rows, self.stride))
        return x.permute(3, 5, 0, 1, 2, 4).flatten(4).flatten(0, 1)

    def unpad(self, x: Tensor) -> Tensor:
        """The inverse of `pad`."""
        x = x.unflatten(3, (self.rows, self.columns)).unflatten(0, (self.stride, self.stride))
        x = x.permute(2, 3, 4, 0, 5, 1).flatten(4).flatten(2, 3)
        bottom, right = self.margin + self.height, self.margin + self.width
        return x[:, :, self.margin : bottom, self.margin : right].contiguous()

    def pad_outputs(self, x: Tensor) -> Tensor:
        """(B, C, h, w) to (B, C, out_height * columns), zero at the filler."""
        return F.pad(x.contiguous(), (0, self.columns - self.out_width)).flatten(2)

    def unpad_outputs(self, x: Tensor) -> Tensor:
        """The inverse of `pad_outputs`."""
        return x.unflatten(2, (self.out_height, self.columns))[..., : self.out_width].contiguous()


def _beyond(shift: int, size: int, stride: int, num_outputs: int) -> list[slice]:
    """Where `stride * output - shift` is not in 0..size-1."""
    first, end = (min(max(-(-bound // stride), 0), num_outputs) for bound in (shift, size + shift))
    return [slice(start, stop) for start, stop in ((0, first), (end, num_outputs)) if start < stop]


def precise(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sums over the window are in float32 at least."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def weights_shape(key: Tensor, prior: Tensor, stride: int, dilation: int) -> tuple[int, int, int]:
    """Of what `window_weights` gives."""
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    return len(key), layout.kernel_size**2, layout.out_height * layout.columns


def parts_of_maps(shape: Sequence[int], device: torch.device) -> list[slice]:
    """A few maps at a time on a CPU, so that what is as large as their weights stays near it; else all of them.

    Args:
        shape: of all weights.
    """
    num_parts = math.ceil(math.prod(shape) / _PART_SIZE) if device.type == "cpu" else 1
    step = math.ceil(shape[0] / max(1, num_parts))
    return [slice(start, start + step) for start in range(0, shape[0], max(1, step))]


def window_scores(
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
    *,
    least: float,
    out: Tensor,
) -> None:
    """What `window_weights` takes the softmax of; written to `out`, in its shape. No gradient passes.

    Args:
        least: how far, at most, a score outside the map is below the middle's; -inf for no limit.
    """
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    query, key, prior = precise(query, key, prior)
    queries, keys = layout.pad_outputs(query), layout.pad(key)
    by_place = layout.by_place(out)
    for (rows, columns), seen in layout.windows(keys):
        scores, here = prior[:, rows, columns, None], by_place[:, rows, columns].flatten(3)
        for q, k in zip(queries.unbind(1), seen.unbind(1)):
            SIMILARITIES[similarity].add_to(scores, q[:, None, None], k, scale, here)
            scores = here
    if saliency is not None:
        for (rows, columns), seen in layout.windows(layout.pad(*precise(saliency))):
            by_place[:, rows, columns].flatten(3).add_(seen[:, 0])
    middle = layout.kernel_size // 2
    # Beside a score of millions no place outside has a weight; of one much larger, `least` less is the same number.
    lowest = (by_place[:, middle, middle, None, None] + least).clamp_(max=1e6)
    for (rows, columns), (y, x) in layout.outside():
        outside = prior[:, rows, columns, None, None] + OUTSIDE
        torch.maximum(outside, lowest[..., y, x], out=by_place[:, rows, columns, y, x])


@custom_op(
    "vitkit::window_weights",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor prior, Tensor? saliency, int stride, int dilation, float scale, "
    "str similarity) -> Tensor",
)
def window_weights(
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> Tensor:
    """Softmax over each output's window. An operator of its own, so that `torch.compile` need not look at its loops.

    Args:
        query: (N, c, h, w).
        key: (N, c, H, W).
        prior: (N, k, k).
        saliency: (N, 1, H, W), added to the scores; or None.
    Returns:
        (N, n, h * columns), each row of outputs with filler at its end.
    """
    weights = query.new_empty(weights_shape(key, prior, stride, dilation), dtype=precise(query)[0].dtype)
    settings = (stride, dilation, scale, similarity)
    for part in parts_of_maps(weights.shape, weights.device):
        salient = None if saliency is None else saliency[part]
        # exp(OUTSIDE) is below the smallest normal float, and processors take long to compute with such numbers.
        window_scores(query[part], key[part], prior[part], salient, *settings, least=_LEAST, out=weights[part])
        attention_weights(weights[part], dim=1, out=weights[part])
        F.threshold_(weights[part], math.exp(_LEAST + 1), 0.0)
    return weights


@window_weights.register_fake
def _(
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> Tensor:
    return query.new_empty(weights_shape(key, prior, stride, dilation), dtype=precise(query)[0].dtype)


@custom_op(
    "vitkit::window_weights_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor weights, Tensor query, Tensor key, Tensor prior, Tensor? saliency, int stride, "
    "int dilation, float scale, str similarity) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _window_weights_backward(
    grad: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    queries, keys = precise(query, key)
    queries, keys = layout.pad_outputs(queries), layout.pad(keys)
    grad_queries, grad_keys = torch.zeros_like(queries), torch.zeros_like(keys)
    grad_salient = grad.new_zeros(() if saliency is None else keys[:, :, :1].shape)
    grad_prior = grad.new_empty(prior.shape)
    gradient = SIMILARITIES[similarity].gradient
    for part in parts_of_maps(weights.shape, weights.device):
        grad_scores = grad[part] * weights[part]
        grad_scores.addcmul_(weights[part], grad_scores.sum(1, keepdim=True), value=-1)
        grad_prior[part] = grad_scores.sum(2).view_as(grad_prior[part])
        by_place = layout.by_place(grad_scores)
        for (rows, columns), (y, x) in layout.outside():
            by_place[:, rows, columns, y, x] = 0
        for place, (phase, here) in enumerate(layout.slices()):
            grad_here = grad_scores[:, place, None]
            by_query, by_key = gradient(queries[part], keys[phase, part, :, here])
            if by_query is not None:
                grad_queries[part].addcmul_(grad_here, by_query, value=scale)
            if by_key is not None:
                grad_keys[phase, part, :, here].addcmul_(grad_here, by_key, value=scale)
            if saliency is not None:
                grad_salient[phase, part, :, here] += grad_here
    return (
        layout.unpad_outputs(grad_queries).to(query.dtype),
        layout.unpad(grad_keys).to(key.dtype),
        grad_prior.to(prior.dtype),
        grad_salient if saliency is None else layout.unpad(grad_salient).to(saliency.dtype),
    )


@_window_weights_backward.register_fake
def _(
    grad: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_saliency = grad.new_empty(()) if saliency is None else _like(saliency)
    return _like(query), _like(key), _like(prior), by_saliency


def _save_for_weights(ctx: Any, inputs: tuple, output: Tensor) -> None:
    query, key, prior, saliency, *ctx.settings = inputs
    ctx.save_for_backward(output, query, key, prior, saliency)


def _weights_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: checkpointing recomputes them, and does so once
    *by_tensor, by_saliency = _window_weights_backward(grad, *saved, *ctx.settings)
    return *by_tensor, None if saved[-1] is None else by_saliency, None, None, None, None


window_weights.register_autograd(_weights_gradients, setup_context=_save_for_weights)


@custom_op(
    "vitkit::window_sum", mutates_args=(), schema="(Tensor weights, Tensor value, int stride, int dilation) -> Tensor"
)
def window_sum(weights: Tensor, value: Tensor, stride: int, dilation: int) -> Tensor:
    """Sums each output's window with the weights of `window_weights`; places outside the map add nothing.

    Args:
        value: (N, channels, H, W).
    Returns:
        (N, channels, h, w), of the value's type.
    """
    layout = _Layout.of(*value.shape[-2:], _side(weights), stride, dilation)
    values = layout.pad(*precise(value))
    output = torch.zeros_like(values[0, ..., : weights.shape[-1]])
    for place, (phase, here) in enumerate(layout.slices()):
        output.addcmul_(weights[:, place, None], values[phase, ..., here])
    return layout.unpad_outputs(output).to(value.dtype)


@window_sum.register_fake
def _(weights: Tensor, value: Tensor, stride: int, dilation: int) -> Tensor:
    return value.new_empty(*value.shape[:2], *(-(-size // stride) for size in value.shape[-2:]))


@custom_op(
    "vitkit::window_sum_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor weights, Tensor value, int stride, int dilation) -> (Tensor, Tensor)",
)
def _window_sum_backward(
    grad: Tensor, weights: Tensor, value: Tensor, stride: int, dilation: int
) -> tuple[Tensor, Tensor]:
    layout = _Layout.of(*value.shape[-2:], _side(weights), stride, dilation)
    grad, values = precise(grad, value)
    grads, values = layout.pad_outputs(grad), layout.pad(values)
    grad_values, grad_weights = torch.zeros_like(values), torch.empty_like(weights)
    by_place = grad_weights.unflatten(1, (layout.kernel_size, -1))
    for part in parts_of_maps(weights.shape, weights.device):
        for (rows, columns), seen in layout.windows(values[:, part]):
            here = by_place[part, rows, columns]
            products = zip(grads[part, :, None, None].unbind(1), seen.unbind(1))
            torch.mul(*next(products), out=here)
            for grad_of_channel, values_of_channel in products:
                here.addcmul_(grad_of_channel, values_of_channel)
        for place, (phase, here) in enumerate(layout.slices()):
            grad_values[phase, part, :, here].addcmul_(weights[part, place, None], grads[part])
    return grad_weights, layout.unpad(grad_values).to(value.dtype)


@_window_sum_backward.register_fake
def _(grad: Tensor, weights: Tensor, value: Tensor, stride: int, dilation: int) -> tuple[Tensor, Tensor]:
    return _like(weights), _like(value)


def _save_for_sum(ctx: Any, inputs: tuple, output: Tensor) -> None:
    weights, value, *ctx.settings = inputs
    ctx.save_for_backward(weights, value)


def _sum_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_window_sum_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None


window_sum.register_autograd(_sum_gradients, setup_context=_save_for_sum)


@register_flop_formula(torch.ops.vitkit.window_sum)
def _window_sum_flops(weights: tuple, value: tuple, stride: int, dilation: int, out_shape: tuple) -> int:
    return 2 * math.prod(out_shape) * weights[1]


def _side(weights: Tensor) -> int:
    return int(weights.shape[1] ** 0.5)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
