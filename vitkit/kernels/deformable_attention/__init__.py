"""The sampled sum in multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159, equation 3).

`plain.py` is the definition. It also runs on devices without a kernel, and on a GPU if a deterministic gradient is
requested. `cpu.py` and `triton.py` compute the same on a CPU and a GPU, and `exported.py` in exported files. With
`cpu.py`, inference of Deformable DETR-R50 (480x640, batch 1) takes 0.37 of the plain form's time on one thread of an
AMD EPYC with AVX-512, torch 2.14.1; earlier, a training step took about half.

Shapes: B batch, L queries, S locations on all levels together, d channels per head. A query's points are in groups of
equal size: one group per level or, if the levels have different numbers of points, several.
"""

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from vitkit.kernels import is_exporting, plain_only
from vitkit.kernels.deformable_attention import cpu, exported, plain


def deformable_attend(
    values: Tensor,
    shapes: Sequence[tuple[int, int]],
    sampling_locations: Tensor,
    weights: Tensor,
    levels: Sequence[int] | None = None,
) -> Tensor:
    """Sum values that are sampled bilinearly at a few locations on every level; values are 0 outside of a map.

    Args:
        values: (B, S, heads, d), the levels concatenated, each row by row.
        shapes: (H, W) of each level; their areas sum to S.
        sampling_locations: (B, L, heads, groups, points, 2), (x, y) in 0..1 from corner to corner of a level's map.
        weights: (B, L, heads, groups, points).
        levels: the level of each group; None: each level has one group.
    Returns:
        (B, L, heads * d), in the dtype of the values; sums are in float32 or higher precision.
    Raises:
        ValueError: the shapes do not fit each other.
    """
    levels = list(range(len(shapes))) if levels is None else list(levels)
    _check_shapes(values, shapes, sampling_locations, weights, levels)
    if is_exporting() and not plain_only():
        return exported.deformable_attend(values, shapes, sampling_locations, weights, levels)
    if _runs_plain(values.device.type, torch.is_grad_enabled()):
        return plain.deformable_attend(values, shapes, sampling_locations, weights, levels)
    sizes = [size for shape in shapes for size in shape]
    return _deformable_attend(values, sizes, sampling_locations, weights, levels)


def _check_shapes(
    values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor, levels: list[int]
) -> None:
    area = sum(height * width for height, width in shapes)
    if values.shape[1] != area:
        raise ValueError(
            f"deformable_attend: values have {values.shape[1]} locations, but the levels {list(shapes)} have {area}."
        )
    if sorted(set(levels)) != list(range(len(shapes))):
        raise ValueError(
            f"deformable_attend: levels={levels}, but shapes has {len(shapes)}: expected a group for each."
        )
    if weights.shape[3] != len(levels):
        what = ("levels", "shapes") if len(levels) == len(shapes) else ("groups", "levels")
        raise ValueError(
            f"deformable_attend: weights are for {weights.shape[3]} {what[0]}, but {what[1]} has {len(levels)}."
        )
    batch_size, _, heads, _ = values.shape
    expected = (batch_size, weights.shape[1], heads, *weights.shape[3:])
    if weights.shape != expected or sampling_locations.shape != (*expected, 2):
        raise ValueError(
            f"deformable_attend: for values {tuple(values.shape)} expected weights (B, L, heads, groups, points) = "
            f"{tuple(expected)} and sampling_locations of that shape and 2, got {tuple(weights.shape)} and "
            f"{tuple(sampling_locations.shape)}."
        )


@torch.compiler.assume_constant_result
def _runs_plain(device: str, needs_grad: bool) -> bool:
    if plain_only():
        return True
    if device == "cuda":
        deterministic = needs_grad and torch.are_deterministic_algorithms_enabled()
        return deterministic or not _has_triton()
    return device != "cpu"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernel(values: Tensor) -> ModuleType:
    if values.device.type == "cpu":
        return cpu
    # Imported on first use: importing Triton takes time, and not every installation has it.
    from vitkit.kernels.deformable_attention import triton

    return triton


def _pairs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(sizes[::2], sizes[1::2]))


# Custom operators, because torch.compile must not trace them: it would unroll the loops over chunks.
@torch.library.custom_op(
    "vitkit::deformable_attend",
    mutates_args=(),
    schema="(Tensor values, SymInt[] sizes, Tensor locations, Tensor weights, int[] levels) -> Tensor",
)
def _deformable_attend(
    values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, levels: Sequence[int]
) -> Tensor:
    return _kernel(values).deformable_attend(values, _pairs(sizes), locations, weights, levels)


@_deformable_attend.register_fake
def _(values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, levels: Sequence[int]) -> Tensor:
    return values.new_empty(*weights.shape[:2], values.shape[2] * values.shape[3])


@torch.library.custom_op(
    "vitkit::deformable_attend_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor values, SymInt[] sizes, Tensor locations, Tensor weights, int[] levels) "
    "-> (Tensor, Tensor, Tensor)",
)
def _deformable_attend_backward(
    grad: Tensor, values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, levels: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _kernel(values).deformable_attend_backward(grad, values, _pairs(sizes), locations, weights, levels)


@_deformable_attend_backward.register_fake
def _(
    grad: Tensor, values: Tensor, sizes: Sequence[int], locations: Tensor, weights: Tensor, levels: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (values, locations, weights))


def _save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    values, ctx.sizes, locations, weights, ctx.levels = inputs
    ctx.save_for_backward(values, locations, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    values, locations, weights = ctx.saved_tensors
    grads = _deformable_attend_backward(grad, values, ctx.sizes, locations, weights, ctx.levels)
    return grads[0], None, grads[1], grads[2], None


_deformable_attend.register_autograd(_backward, setup_context=_save_inputs)
