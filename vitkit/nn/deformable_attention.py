"""Multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159) without a compiled extension.

Shapes: B batch, L queries, S places of all levels together, d channels per head. Locations are (x, y) in 0..1 of a
level's map, corner to corner; masks are bool with True = padding.
"""

import importlib.util
import itertools
import math
import os
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import attention_weights
from vitkit.nn.linear import Linear

PATHS = ("reference", "torch", "triton")


def deformable_attend(
    values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sum of values sampled at a few places of every level, bilinearly; places outside a map give 0.

    How it is computed depends on the device: PyTorch's row operations on a CPU, a Triton kernel on a GPU, and gathered
    rows elsewhere, in an export and where a deterministic gradient is asked for on a GPU. The environment variable
    VITKIT_DEFORMABLE (reference, torch or triton) forces one; a compiled model keeps what it was compiled with.

    Args:
        values: (B, S, heads, d), the levels one after the other, each row by row.
        shapes: (H, W) per level; their areas sum to S.
        sampling_locations: (B, L, heads, levels, points, 2).
        weights: (B, L, heads, levels, points).
    Returns:
        (B, L, heads * d), of the values' type; sums are in float32 at least.
    Raises:
        ValueError: the shapes do not fit each other.
        ConfigError: VITKIT_DEFORMABLE is not one of its values, or asks for what cannot run here.
    """
    _check(values, shapes, sampling_locations, weights)
    path = _path(values.device.type, torch.is_grad_enabled())
    if path == "gather":
        return _attend_by_gathering(values, shapes, sampling_locations, weights)
    if path == "reference":
        return _attend_by_looping(values, shapes, sampling_locations, weights)
    sizes = [size for shape in shapes for size in shape]
    return _deformable_attend(values, sizes, sampling_locations, weights, path)


def _check(values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor) -> None:
    places = sum(height * width for height, width in shapes)
    if values.shape[1] != places:
        raise ValueError(
            f"deformable_attend: values have {values.shape[1]} places, but the levels {list(shapes)} have {places}."
        )
    if weights.shape[3] != len(shapes):
        raise ValueError(f"deformable_attend: weights are for {weights.shape[3]} levels, but shapes has {len(shapes)}.")
    batch_size, _, heads, _ = values.shape
    expected = (batch_size, weights.shape[1], heads, *weights.shape[3:])
    if weights.shape != expected or sampling_locations.shape != (*expected, 2):
        raise ValueError(
            f"deformable_attend: for values {tuple(values.shape)} expected weights (B, L, heads, levels, points) = "
            f"{tuple(expected)} and sampling_locations of that shape and 2, got {tuple(weights.shape)} and "
            f"{tuple(sampling_locations.shape)}."
        )


def _exporting() -> bool:
    """Whether a graph is recorded for another program, which knows PyTorch's operations only."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return True
    if hasattr(torch.compiler, "is_exporting"):  # since PyTorch 2.7
        return torch.compiler.is_exporting()
    return torch.compiler.is_compiling()


@torch.compiler.assume_constant_result
def _path(device: str, needs_grad: bool) -> str:
    # In here, since some versions' compilers take `is_exporting` for true wherever they trace it themselves.
    if _exporting():
        return "gather"
    path = os.environ.get("VITKIT_DEFORMABLE")
    if path and path not in PATHS:
        raise ConfigError(f"VITKIT_DEFORMABLE={path!r}: expected one of {', '.join(PATHS)}.")
    if not path:
        deterministic = needs_grad and torch.are_deterministic_algorithms_enabled()
        path = "triton" if device == "cuda" and not deterministic and _has_triton() else "torch"
    if path == "triton" and not _has_triton():
        raise ConfigError("VITKIT_DEFORMABLE=triton: the package triton is not installed (pip install triton).")
    if path == "torch":
        return "bag" if device == "cpu" else "gather"
    return path


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _backend(path: str) -> ModuleType:
    # Imported when first used: Triton takes its time, and not every installation has it.
    if path == "triton":
        from vitkit.nn import deformable_triton

        return deformable_triton
    from vitkit.nn import deformable_bag

    return deformable_bag


def _pairs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(sizes[::2], sizes[1::2]))


# Operations of their own, because tracing compilers must not look inside: they would unroll the loops over chunks.
@torch.library.custom_op(
    "vitkit::deformable_attend",
    mutates_args=(),
    schema="(Tensor values, SymInt[] sizes, Tensor locations, Tensor weights, str path) -> Tensor",
)
def _deformable_attend(values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, path: str) -> Tensor:
    return _backend(path).attend(values, _pairs(sizes), locations, weights)


@_deformable_attend.register_fake
def _(values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, path: str) -> Tensor:
    return values.new_empty(*weights.shape[:2], values.shape[2] * values.shape[3])


@torch.library.custom_op(
    "vitkit::deformable_attend_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor values, SymInt[] sizes, Tensor locations, Tensor weights, str path) "
    "-> (Tensor, Tensor, Tensor)",
)
def _deformable_attend_backward(
    grad: Tensor, values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _backend(path).attend_backward(grad, values, _pairs(sizes), locations, weights)


@_deformable_attend_backward.register_fake
def _(
    grad: Tensor, values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, path: str
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (values, locations, weights))


def _save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    values, ctx.sizes, locations, weights, ctx.path = inputs
    ctx.save_for_backward(values, locations, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, locations, weights = ctx.saved_tensors
    grads = _deformable_attend_backward(grad, values, ctx.sizes, locations, weights, ctx.path)
    return grads[0], None, grads[1], grads[2], None


_deformable_attend.register_autograd(_backward, setup_context=_save_inputs)


def _attend_by_gathering(
    values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """By PyTorch's most ordinary operations, on any device and in any export; keeps all it reads for the gradient."""
    batch_size, places, heads, channels = values.shape
    dtype = torch.promote_types(values.dtype, torch.float32)
    table = values.to(dtype).flatten(0, 2)
    image = torch.arange(batch_size, device=values.device)[:, None] * places * heads
    first = (image + torch.arange(heads, device=values.device))[:, None, :, None]
    output = values.new_zeros(*weights.shape[:3], channels, dtype=dtype)
    start = 0
    for level, (height, width) in enumerate(shapes):
        x, y = (sampling_locations[:, :, :, level].to(dtype) * table.new_tensor((width, height)) - 0.5).unbind(-1)
        left, top = x.floor(), y.floor()
        beside, below = x - left, y - top
        columns, rows = ((left, 1 - beside), (left + 1, beside)), ((top, 1 - below), (top + 1, below))
        for (column, share_x), (row, share_y) in itertools.product(columns, rows):
            share = share_x * share_y * weights[:, :, :, level].to(dtype)
            outside = (column < 0) | (column >= width) | (row < 0) | (row >= height)
            # Limits come after the conversion: what is not a number turns into some integer.
            place = row.long().clamp(0, height - 1) * width + column.long().clamp(0, width - 1)
            index = first + (start + place) * heads
            read = table.index_select(0, index.flatten()).view(*index.shape, channels)
            output = output + (read * share.masked_fill(outside, 0)[..., None]).sum(-2)
        start += height * width
    return output.flatten(2).to(values.dtype)


def _attend_by_looping(
    values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """The definition, a sample at a time: what the others are checked against."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    values_by_level = values.to(dtype).split([height * width for height, width in shapes], dim=1)
    output = []
    for image, query, head in itertools.product(*map(range, weights.shape[:3])):
        total = values.new_zeros(values.shape[-1], dtype=dtype)
        for level, point in itertools.product(*map(range, weights.shape[3:])):
            height, width = shapes[level]
            x, y = sampling_locations[image, query, head, level, point].to(dtype)
            x, y = x * width - 0.5, y * height - 0.5
            left, top = math.floor(x.item()), math.floor(y.item())
            for row, column in itertools.product((top, top + 1), (left, left + 1)):
                if 0 <= row < height and 0 <= column < width:
                    below, beside = y - top, x - left
                    share = (below if row > top else 1 - below) * (beside if column > left else 1 - beside)
                    weight = weights[image, query, head, level, point].to(dtype)
                    total = total + weight * share * values_by_level[level][image, row * width + column, head]
        output.append(total)
    shape = (*weights.shape[:2], values.shape[2] * values.shape[3])
    return (torch.cat(output) if output else values.flatten()[:0]).view(shape).to(values.dtype)


class MultiScaleDeformableAttention(nn.Module):
    """Every query reads a few places around its reference point on every level, at offsets it predicts itself.

    Args:
        d_model: channels of queries, memory and output.
        num_heads: a divisor of `d_model`.
        num_levels: maps in the memory.
        num_points: places per head and level.
    Raises:
        ConfigError: `num_heads` does not divide `d_model`.
    """

    def __init__(self, d_model: int, num_heads: int, *, num_levels: int, num_points: int):
        super().__init__()
        if d_model % num_heads:
            raise ConfigError(f"MultiScaleDeformableAttention: num_heads={num_heads} must divide d_model={d_model}.")
        if num_levels < 1 or num_points < 1:
            raise ConfigError(
                f"MultiScaleDeformableAttention: num_levels={num_levels}, num_points={num_points}: expected at least 1."
            )
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = Linear(d_model, 2 * samples)
        self.attention_weights = Linear(d_model, samples)
        self.value_proj = Linear(d_model, d_model)
        self.output_proj = Linear(d_model, d_model)
        self.samples: list[tuple[Tensor, Tensor]] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts with equal weights at 1, 2, ... cells from the reference point, each head in a direction of its own.

        A model that initialises all its matrices in one way calls this again afterwards.
        """
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        offsets = (directions[:, None, None] * steps[:, None]).expand(-1, self.num_levels, -1, -1)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self,
        queries: Tensor,
        memory: Tensor,
        *,
        reference_points: Tensor,
        shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            queries: (B, L, d_model).
            memory: (B, S, d_model), the levels one after the other.
            reference_points: (B, L, levels, 2) as (x, y), or (B, L, levels, 4) as cxcywh, in 0..1 of each level's map.
            shapes: (H, W) per level.
            padding_mask: (B, S) bool, True = padding, which reads as 0.
        Returns:
            (B, L, d_model).
        Raises:
            ValueError: the number of levels, places or coordinates is not as above.
        """
        values = self.value_proj(memory)
        if padding_mask is not None:
            values = values.masked_fill(padding_mask[..., None], 0)
        values = values.unflatten(-1, (self.num_heads, -1))
        locations = self._sampling_locations(queries, reference_points, shapes)
        scores = self.attention_weights(queries).unflatten(-1, (self.num_heads, -1))
        weights = attention_weights(scores).unflatten(-1, (self.num_levels, -1)).to(values.dtype)
        if self.samples is not None:
            self.samples.append((locations, weights))
        return self.output_proj(deformable_attend(values, shapes, locations, weights))

    def _sampling_locations(
        self, queries: Tensor, reference_points: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        """(B, L, heads, levels, points, 2), at least in float32."""
        if len(shapes) != self.num_levels or reference_points.shape[2] != self.num_levels:
            raise ValueError(
                f"MultiScaleDeformableAttention: num_levels={self.num_levels}, but got {len(shapes)} shapes and "
                f"reference points for {reference_points.shape[2]} levels."
            )
        offsets = self.sampling_offsets(queries)
        offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))
        offsets = offsets.unflatten(-1, (self.num_heads, -1))
        centers = self._for_points(reference_points[..., :2])
        if reference_points.shape[-1] == 2:
            sizes = offsets.new_tensor([(width, height) for height, width in shapes])
            locations = centers + offsets / self._for_points(sizes)
        elif reference_points.shape[-1] == 4:
            sizes = reference_points[..., 2:] * (0.5 / self.num_points)
            locations = centers + offsets * self._for_points(sizes)
        else:
            raise ValueError(
                "MultiScaleDeformableAttention: reference points have 2 coordinates (x, y) or 4 (cxcywh), "
                f"got {reference_points.shape[-1]}."
            )
        return locations.unflatten(-1, (self.num_levels, self.num_points, 2))

    def _for_points(self, x: Tensor) -> Tensor:
        """(..., levels, 2) -> (..., 1, levels * points * 2): long rows are computed with in a fraction of the time."""
        return x[..., None, :, None, :].expand(*x.shape[:-2], 1, -1, self.num_points, -1).flatten(-3)


class SamplingRecorder:
    """Collects where a model's deformable attention looks, and how much, while the `with` block lasts.

        with SamplingRecorder(model) as samples:
            model(images, padding_mask)
        locations, weights = samples["head.decoder.layers.5.cross_attn"][0]

    `samples` has one list per `MultiScaleDeformableAttention`, under its dotted name, with one entry per call:
    locations (B, L, heads, levels, points, 2) and weights (B, L, heads, levels, points), both in the autograd graph.
    Compiled models run uncompiled meanwhile.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.samples: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __enter__(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        for name, module in self._attentions():
            assert module.samples is None, "samples are already being recorded"
            module.samples = self.samples.setdefault(name, [])
        return self.samples

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, module in self._attentions():
            module.samples = None
        self._eager.__exit__(kind, error, trace)

    def _attentions(self) -> list[tuple[str, MultiScaleDeformableAttention]]:
        modules = self.model.named_modules()
        return [(name, module) for name, module in modules if isinstance(module, MultiScaleDeformableAttention)]
