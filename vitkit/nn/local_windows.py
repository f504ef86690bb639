"""The operators of local relation: each place's softmax over its window, and the sum of the window by such weights.

Shapes: B batch, G groups of channels that share weights, (H, W) the map, (h, w) = (ceil(H / stride), ceil(W / stride))
the output, k the side of the window, and n = k * k its places, row by row.

How it is computed: a map is padded and its rows follow each other in memory, so that the map as one place of the window
sees it, for all outputs at once, is a slice. The loops run over the n slices; the map is never unfolded.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from vitkit.nn.attention import attention_weights

OUTSIDE = -100.0
"""Similarity to a place outside the map. It still takes part in the softmax, with its geometry prior."""

_NOTHING = 1e-30
"""A weight up to which a place counts for nothing."""

_PART_SIZE = 2**21


class Similarity(NamedTuple):
    """The appearance term of one channel, from a query and a key."""

    value: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor | None]]
    """Derivatives by query and by key; None for 0."""


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
    "product": Similarity(lambda q, k: q * k, lambda q, k: (k, q)),
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

    def outside(self, device: torch.device) -> Tensor:
        """(n, out_height * columns) bool, where the window's places lie beyond the map."""
        steps = self.dilation * torch.arange(self.kernel_size, device=device)[:, None] - self.margin
        y = steps + self.stride * torch.arange(self.out_height, device=device)
        x = steps + self.stride * torch.arange(self.columns, device=device)
        y_out, x_out = (y < 0) | (y >= self.height), (x < 0) | (x >= self.width)
        return (y_out[:, None, :, None] | x_out[None, :, None, :]).flatten(0, 1).flatten(1)

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


def _precise(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sums over the window are in float32 at least."""
    return tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)


def _weights_shape(key: Tensor, prior: Tensor, stride: int, dilation: int) -> tuple[int, int, int, int]:
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    return len(key), len(prior), layout.kernel_size**2, layout.out_height * layout.columns


def _parts(weights: Tensor) -> Iterator[slice]:
    """A few images at a time on a CPU, so that what is as large as their weights stays near it."""
    step = max(1, _PART_SIZE // weights[0].numel()) if weights.device.type == "cpu" else len(weights)
    return (slice(start, start + step) for start in range(0, len(weights), step))


def _grouped(x: Tensor, num_groups: int) -> Tensor:
    return x.unflatten(-2, (num_groups, -1))


def window_scores(
    query: Tensor,
    key: Tensor,
    prior: Tensor,
    saliency: Tensor | None,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> Tensor:
    """What `window_weights` takes the softmax of; in its shape. No gradient passes."""
    num_groups = len(prior)
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    query, key, prior = _precise(query, key, prior)
    queries, keys = _grouped(layout.pad_outputs(query), num_groups), _grouped(layout.pad(key), num_groups)
    places = prior.flatten(1)
    # All that follows is in place: this is the largest tensor of the forward pass, beside the weights.
    scores = queries.new_empty(len(queries), num_groups, places.shape[1], queries.shape[-1])
    value = SIMILARITIES[similarity].value
    for place, (phase, here) in enumerate(layout.slices()):
        appearance = value(queries, keys[phase][..., here])
        scores[:, :, place] = appearance[:, :, 0] if appearance.shape[2] == 1 else appearance.sum(2)
    if scale != 1:
        scores *= scale
    if saliency is not None:
        salient = layout.pad(*_precise(saliency))
        for place, (phase, here) in enumerate(layout.slices()):
            scores[:, :, place] += salient[phase][..., here]
    scores.masked_fill_(layout.outside(scores.device), OUTSIDE)
    return scores.add_(places[:, :, None])


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
        saliency: (B, G, H, W), added to the scores; or None.
    Returns:
        (B, G, n, h * columns), each row of outputs with filler at its end.
    """
    weights = query.new_empty(_weights_shape(key, prior, stride, dilation), dtype=_precise(query)[0].dtype)
    for images in _parts(weights):
        salient = None if saliency is None else saliency[images]
        scores = window_scores(query[images], key[images], prior, salient, stride, dilation, scale, similarity)
        attention_weights(scores, dim=2, out=weights[images])
    # exp(OUTSIDE) is below the smallest normal float, and Intel's processors take long to multiply such numbers.
    return F.threshold_(weights, _NOTHING, 0.0)


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
    return query.new_empty(_weights_shape(key, prior, stride, dilation), dtype=_precise(query)[0].dtype)


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
    num_groups = len(prior)
    layout = _Layout.of(*key.shape[-2:], prior.shape[-1], stride, dilation)
    queries, keys = _precise(query, key)
    queries, keys = _grouped(layout.pad_outputs(queries), num_groups), _grouped(layout.pad(keys), num_groups)
    grad_queries, grad_keys = torch.zeros_like(queries), torch.zeros_like(keys)
    grad_salient = grad.new_zeros(() if saliency is None else keys.select(3, 0).shape)
    grad_prior = grad.new_zeros(prior.shape)
    gradient = SIMILARITIES[similarity].gradient
    outside = layout.outside(grad.device)
    for images in _parts(weights):
        grad_scores = grad[images] * weights[images]
        grad_scores.addcmul_(weights[images], grad_scores.sum(2, keepdim=True), value=-1)
        grad_prior += grad_scores.sum((0, 3)).view(prior.shape)
        grad_scores.masked_fill_(outside, 0)
        for place, (phase, here) in enumerate(layout.slices()):
            grad_here = grad_scores[:, :, place, None]
            by_query, by_key = gradient(queries[images], keys[phase, images, ..., here])
            if by_query is not None:
                grad_queries[images].addcmul_(grad_here, by_query, value=scale)
            if by_key is not None:
                grad_keys[phase, images, ..., here].addcmul_(grad_here, by_key, value=scale)
            if saliency is not None:
                grad_salient[phase, images, :, here] += grad_here[:, :, 0]
    return (
        layout.unpad_outputs(grad_queries.flatten(1, 2)).to(query.dtype),
        layout.unpad(grad_keys.flatten(2, 3)).to(key.dtype),
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
        value: (B, G * channels, H, W).
    Returns:
        (B, G * channels, h, w), of the value's type.
    """
    layout = _Layout.of(*value.shape[-2:], _side(weights), stride, dilation)
    values = _grouped(layout.pad(*_precise(value)), weights.shape[1])
    output = torch.zeros_like(values[0, ..., : weights.shape[-1]])
    for place, (phase, here) in enumerate(layout.slices()):
        output.addcmul_(weights[:, :, place, None], values[phase][..., here])
    return layout.unpad_outputs(output.flatten(1, 2)).to(value.dtype)


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
    num_groups = weights.shape[1]
    grad, values = _precise(grad, value)
    grads, values = _grouped(layout.pad_outputs(grad), num_groups), _grouped(layout.pad(values), num_groups)
    grad_values, grad_weights = torch.zeros_like(values), torch.empty_like(weights)
    for place, (phase, here) in enumerate(layout.slices()):
        torch.sum(grads * values[phase][..., here], 2, out=grad_weights[:, :, place])
        grad_values[phase][..., here].addcmul_(weights[:, :, place, None], grads)
    return grad_weights, layout.unpad(grad_values.flatten(2, 3)).to(value.dtype)


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
    batch_size, channels, height, width = out_shape
    return 2 * batch_size * channels * height * width * weights[2]


def _side(weights: Tensor) -> int:
    return int(weights.shape[2] ** 0.5)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
