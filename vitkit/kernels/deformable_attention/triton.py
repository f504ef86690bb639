"""Deformable attention as Triton kernels, for GPUs.

One program processes a block of queries of one head and loops over their samples; only inputs and gradients are stored
in memory. The gradient of the values is summed by atomic additions, in no fixed order.
"""

import contextlib
import functools
import warnings
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LAUNCHES = {"forward": dict(tile=256, num_warps=1), "backward": dict(tile=128, num_warps=1)}
"""Launch parameters of each kernel: the number of queries times channels per program, and its number of warps. Among
tiles of 128 to 2048 with 1 to 8 warps, these are the fastest for an encoder layer on an H200 (bf16, batch 2, 800x1333,
torch 2.11), 0.16 and 0.94 ms, and take 0.017 and 0.068 ms for 300 queries; 1024 with 4 warps takes 0.17, 1.02, 0.027
and 0.079 ms."""


def deformable_attend(
    values: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor, levels: Sequence[int]
) -> Tensor:
    """Sum sampled values with a single kernel."""
    values, locations, weights = values.contiguous(), locations.contiguous(), weights.contiguous()
    output = values.new_empty(*weights.shape[:2], values.shape[2] * values.shape[3])
    _launch("forward", (values,), _maps(tuple(shapes), tuple(levels), values.device), (locations, weights, output))
    return output


def deformable_attend_backward(
    grad: Tensor,
    values: Tensor,
    shapes: list[tuple[int, int]],
    locations: Tensor,
    weights: Tensor,
    levels: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of values, locations and weights.

    Args:
        grad: (B, L, heads * d), the output's gradient; the other arguments are those of `deformable_attend`.
    Raises:
        RuntimeError: deterministic algorithms are requested.
    """
    _refuse_determinism()
    grad, values, locations, weights = (x.contiguous() for x in (grad, values, locations, weights))
    grad_values = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    grad_locations, grad_weights = torch.empty_like(locations), torch.empty_like(weights)
    maps = _maps(tuple(shapes), tuple(levels), values.device)
    _launch("backward", (values, grad_values), maps, (locations, weights, grad, grad_locations, grad_weights))
    return grad_values.to(values.dtype), grad_locations, grad_weights


def _refuse_determinism() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        "deformable attention's Triton kernel has no deterministic backward pass: ask for deterministic algorithms "
        "before the forward pass, or set VITKIT_KERNELS=plain."
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def _launch(name: str, tables: tuple[Tensor, ...], maps: Tensor, queries: tuple[Tensor, ...]) -> None:
    values, weights = tables[0], queries[1]
    batch_size, num_queries, heads, groups, points = weights.shape
    if weights.numel() == 0:
        return
    sizes = constants(heads, groups, points, values.shape[3], **LAUNCHES[name])
    # Programs for heads of the same queries are neighbors, because they read the same pixels.
    grid = (triton.cdiv(num_queries, sizes["BLOCK_QUERIES"]) * heads, batch_size)
    on_device = torch.cuda.device(values.device) if values.device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        KERNELS[name][grid](
            *tables,
            maps,
            *queries,
            values.shape[1],
            num_queries,
            SUM=tl.float64 if values.dtype == torch.float64 else tl.float32,
            **sizes,
        )


def constants(heads: int, groups: int, points: int, channels: int, *, tile: int, num_warps: int) -> dict[str, int]:
    """Return the constants that a kernel is compiled for, in addition to types."""
    block_channels = triton.next_power_of_2(channels)
    return dict(
        HEADS=heads,
        GROUPS=groups,
        POINTS=points,
        CHANNELS=channels,
        BLOCK_CHANNELS=block_channels,
        BLOCK_QUERIES=max(1, tile // block_channels),
        num_warps=num_warps,
    )


@functools.lru_cache(maxsize=256)
def _maps(shapes: tuple[tuple[int, int], ...], levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (groups, 3) int32: height, width and first pixel; cached, as copying to a GPU outlasts the kernel."""
    rows, first_pixel = [], 0
    for height, width in shapes:
        rows.append((height, width, first_pixel))
        first_pixel += height * width
    return torch.tensor([rows[level] for level in levels], dtype=torch.int32).to(device, non_blocking=True)


@triton.jit
def _attend_kernel(
    values,
    maps,
    locations,
    weights,
    output,
    num_pixels,
    num_queries,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SUM: tl.constexpr,
):
    image, head, query, channel, output_index, is_query, is_output = _position(
        num_queries, HEADS, CHANNELS, BLOCK_CHANNELS, BLOCK_QUERIES
    )
    values += (image * num_pixels * HEADS + head) * CHANNELS
    total = tl.zeros([BLOCK_QUERIES, BLOCK_CHANNELS], SUM)
    for group in range(GROUPS):
        height, width, first_pixel = _map(maps, group)
        for point in range(POINTS):
            sample = (query * GROUPS + group) * POINTS + point
            weight = tl.load(weights + sample, mask=is_query, other=0).to(SUM)
            left, top, right_share, lower_share = _cell(locations, sample, is_query, height, width, SUM)
            for corner in tl.static_range(4):
                pixel, inside, share_x, share_y, _, _ = _corner(
                    left, top, right_share, lower_share, height, width, first_pixel, corner
                )
                mask = (inside & is_query)[:, None] & (channel < CHANNELS)[None, :]
                read = tl.load(values + pixel[:, None] * (HEADS * CHANNELS) + channel[None, :], mask=mask, other=0)
                total += (weight * share_x * share_y)[:, None] * read.to(SUM)
    tl.store(output + output_index, total.to(output.dtype.element_ty), mask=is_output)


@triton.jit
def _backward_kernel(
    values,
    grad_values,
    maps,
    locations,
    weights,
    grad_output,
    grad_locations,
    grad_weights,
    num_pixels,
    num_queries,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    POINTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    SUM: tl.constexpr,
):
    image, head, query, channel, output_index, is_query, is_output = _position(
        num_queries, HEADS, CHANNELS, BLOCK_CHANNELS, BLOCK_QUERIES
    )
    values += (image * num_pixels * HEADS + head) * CHANNELS
    grad_values += (image * num_pixels * HEADS + head) * CHANNELS
    grad = tl.load(grad_output + output_index, mask=is_output, other=0).to(SUM)
    for group in range(GROUPS):
        height, width, first_pixel = _map(maps, group)
        for point in range(POINTS):
            sample = (query * GROUPS + group) * POINTS + point
            weight = tl.load(weights + sample, mask=is_query, other=0).to(SUM)
            left, top, right_share, lower_share = _cell(locations, sample, is_query, height, width, SUM)
            grad_weight = tl.zeros([BLOCK_QUERIES], SUM)
            grad_x = tl.zeros([BLOCK_QUERIES], SUM)
            grad_y = tl.zeros([BLOCK_QUERIES], SUM)
            for corner in tl.static_range(4):
                pixel, inside, share_x, share_y, slope_x, slope_y = _corner(
                    left, top, right_share, lower_share, height, width, first_pixel, corner
                )
                mask = (inside & is_query)[:, None] & (channel < CHANNELS)[None, :]
                offset = pixel[:, None] * (HEADS * CHANNELS) + channel[None, :]
                read = tl.load(values + offset, mask=mask, other=0).to(SUM)
                product = tl.sum(read * grad, axis=1)
                grad_weight += share_x * share_y * product
                grad_x += slope_x * share_y * product
                grad_y += slope_y * share_x * product
                tl.atomic_add(
                    grad_values + offset, (weight * share_x * share_y)[:, None] * grad, mask=mask, sem="relaxed"
                )
            dtype = grad_locations.dtype.element_ty
            tl.store(grad_locations + 2 * sample, (grad_x * weight * width).to(dtype), mask=is_query)
            tl.store(grad_locations + 2 * sample + 1, (grad_y * weight * height).to(dtype), mask=is_query)
            tl.store(grad_weights + sample, grad_weight.to(grad_weights.dtype.element_ty), mask=is_query)


@triton.jit
def _position(
    num_queries, HEADS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, BLOCK_QUERIES: tl.constexpr
):
    """Image and head of this program, its queries' numbers among all heads of all queries, its output indices."""
    image = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEADS
    query = tl.program_id(0) // HEADS * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = query < num_queries
    query = (image * num_queries + query) * HEADS + head
    channel = tl.arange(0, BLOCK_CHANNELS)
    output_index = query[:, None] * CHANNELS + channel[None, :]
    is_output = is_query[:, None] & (channel < CHANNELS)[None, :]
    return image, head, query, channel, output_index, is_query, is_output


@triton.jit
def _map(maps, group):
    return tl.load(maps + 3 * group), tl.load(maps + 3 * group + 1), tl.load(maps + 3 * group + 2)


@triton.jit
def _cell(locations, sample, is_query, height, width, SUM: tl.constexpr):
    """Column and row of the pixel left and above, as floats, and the fractions of the pixels to its right and below."""
    x = tl.load(locations + 2 * sample, mask=is_query, other=0).to(SUM) * width - 0.5
    y = tl.load(locations + 2 * sample + 1, mask=is_query, other=0).to(SUM) * height - 0.5
    left, top = tl.floor(x), tl.floor(y)
    return left, top, x - left, y - top


@triton.jit
def _corner(left, top, right_share, lower_share, height, width, first_pixel, CORNER: tl.constexpr):
    """A corner's pixel, whether it is on the map, its fractions, and how these grow with x and y."""
    if CORNER % 2 == 1:
        column, share_x, slope_x = left + 1, right_share, 1
    else:
        column, share_x, slope_x = left, 1 - right_share, -1
    if CORNER // 2 == 1:
        row, share_y, slope_y = top + 1, lower_share, 1
    else:
        row, share_y, slope_y = top, 1 - lower_share, -1
    # Compared as floats: values that are far away or nan cannot be converted to integers.
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    pixel = first_pixel + row.to(tl.int32) * width + column.to(tl.int32)
    return pixel.to(tl.int64), inside, share_x, share_y, slope_x, slope_y


KERNELS = {"forward": _attend_kernel, "backward": _backward_kernel}
