"""Deformable attention on a CPU as an embedding bag.

The values are a table with a row for each location and head. Each head of a query reads four rows per sample, at the
corners of the cell around it, and computes their weighted sum: `embedding_bag`. In the backward pass, the gradients of
the weights are products of the same pairs of rows (`sampled_addmm`), and the gradient of the values is another bag, of
the queries that read each row.

Shapes: L queries, N = heads * groups * points samples of a query, d channels per head, R = S * heads table rows.
"""

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 18
"""Number of samples processed at a time: few enough for a processor's cache, enough for its threads."""


def deformable_attend(
    values: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor, levels: Sequence[int]
) -> Tensor:
    """Sum sampled values by embedding bags."""
    heads, channels = values.shape[2:]
    tables = _tables(values)
    groups = _Groups.of(tuple(shapes), tuple(levels), weights.shape[2:], tables.dtype)
    output = values.new_empty(*weights.shape[:2], heads * channels)
    for image, table in enumerate(tables):
        for chunk in _chunks(weights):
            samples = _Samples.of(locations[image, chunk], weights[image, chunk], groups)
            rows, shares = samples.corner_rows(), samples.corner_shares()
            bounds = _equal_bounds(rows)
            output[image, chunk] = _embedding_bag(table, rows.flatten(), bounds, shares.flatten()).view(
                -1, heads * channels
            )
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
    """
    heads, channels = values.shape[2:]
    tables = _tables(values)
    groups = _Groups.of(tuple(shapes), tuple(levels), weights.shape[2:], tables.dtype)
    grad_tables = torch.zeros_like(tables)
    grad_locations = torch.empty_like(locations, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    rows = torch.empty(weights.shape[1:], dtype=torch.int32)
    shares = tables.new_empty(weights.shape[1], heads, 4, *weights.shape[3:])
    for image, table in enumerate(tables):
        grad_rows = grad[image].to(tables.dtype).reshape(-1, channels)
        for chunk in _chunks(weights):
            samples = _Samples.of(locations[image, chunk], weights[image, chunk], groups)
            queries = grad_rows[chunk.start * heads : chunk.stop * heads]
            by_location, by_weight = samples.gradients(_multiply_rows(queries, table, samples.corner_rows()))
            grad_locations[image, chunk] = by_location.view_as(grad_locations[image, chunk])
            grad_weights[image, chunk] = by_weight.view_as(grad_weights[image, chunk])
            rows[chunk] = samples.rows.view_as(rows[chunk])
            shares[chunk] = samples.corner_shares().view_as(shares[chunk])
        _add_value_gradients(grad_tables[image], grad_rows, rows, shares, shapes, levels)
    return grad_tables.view_as(values).to(values.dtype), grad_locations, grad_weights


def _tables(values: Tensor) -> Tensor:
    """Return the values as tables, (B, R, d), in float32 or higher precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).flatten(1, 2).contiguous()


def _chunks(weights: Tensor) -> list[slice]:
    """Return slices of the queries."""
    queries, samples = weights.shape[1], weights.shape[2:].numel()
    step = max(1, CHUNK // max(1, samples))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


class _Groups(NamedTuple):
    """Properties of the map that each of a query's samples reads."""

    sizes: Tensor
    """(2, 1, N) width and height."""
    last_cell: Tensor
    """(2, 1, N) column and row of the last cell with all four corners inside the map."""
    has_far: Tensor
    """(2, 1, N) 1, or 0 if a map is only one pixel wide or high, so that a cell has no right or lower corner."""
    first_row: Tensor
    """(N,) int32, table row of the map's first pixel."""
    steps: Tensor
    """(2, N) int32, table rows to the next pixel to the right and below; 0 if there is none."""
    corner_steps: Tensor
    """(4, groups * points) int32, table rows from a cell's first corner to each corner."""

    @classmethod
    @functools.lru_cache(maxsize=64)  # of DEIMv2-Atto's inference, it saves 3 %
    @torch.inference_mode(False)  # autograd must be able to save them later
    def of(
        cls, shapes: tuple[tuple[int, int], ...], levels: tuple[int, ...], counts: torch.Size, dtype: torch.dtype
    ) -> "_Groups":
        """Compute everything that does not depend on the locations; `counts` are those of heads, groups and points."""
        heads, groups, points = counts
        heights, widths = torch.tensor([shapes[level] for level in levels], dtype=torch.int32).T
        first_pixels = torch.tensor(_first_pixels(shapes))[list(levels)]
        first_row = first_pixels * heads + torch.arange(heads)[:, None]
        sizes = torch.stack((widths, heights))
        right, down = (widths > 1) * heads, (heights > 1) * widths * heads

        def per_sample(x: Tensor) -> Tensor:
            return x[..., None, :, None].expand(*x.shape[:-1], heads, groups, points).flatten(-3)

        return cls(
            sizes=per_sample(sizes)[:, None].to(dtype),
            last_cell=per_sample((sizes - 2).clamp(min=0))[:, None].to(dtype),
            has_far=per_sample(sizes > 1)[:, None].to(dtype),
            first_row=first_row.int()[..., None].expand(-1, -1, points).flatten(),
            steps=per_sample(torch.stack((right, down)).int()),
            corner_steps=torch.stack((right * 0, right, down, right + down)).int().repeat_interleave(points, -1),
        )


class _Samples(NamedTuple):
    """The samples of a range of queries of one image."""

    rows: Tensor
    """(L, N) int32, table row of the first of four corners. Near a map's border, this is the nearest cell inside;
    corners that a sample does not touch have weight zero."""
    offsets: Tensor
    """(2, L, N) x and y from the first corner, in pixels."""
    near: Tensor
    """(2, L, N) weight of the left and the upper corners."""
    far: Tensor
    """(2, L, N) weight of the right and the lower corners."""
    weights: Tensor
    """(L, N), attention weight of each sample."""
    groups: _Groups

    @classmethod
    def of(cls, locations: Tensor, weights: Tensor, groups: _Groups) -> "_Samples":
        """Compute the cell of each sample, and the weights of its corners."""
        dtype = groups.sizes.dtype
        pixels = locations.flatten(1, -2).movedim(-1, 0).to(dtype).contiguous()
        pixels = (pixels * groups.sizes).sub_(0.5)
        cells = torch.clamp(pixels, torch.zeros_like(groups.last_cell), groups.last_cell).floor_()
        offsets = pixels.sub_(cells)
        # A location that is not a number must result in nan, but not in a row outside the table.
        x, y = cells.int().clamp_(min=0)
        rows = torch.addcmul(groups.first_row, x, groups.steps[0]).addcmul_(y, groups.steps[1])
        near = offsets.abs().neg_().add_(1).clamp_(min=0)
        far = (offsets - 1).abs_().neg_().add_(1).clamp_(min=0).mul_(groups.has_far)
        return cls(rows, offsets, near, far, weights.flatten(1).to(dtype), groups)

    def corner_rows(self) -> Tensor:
        """Return the table rows of the corners, (L * heads, 4, groups * points) int32."""
        return self._by_head(self.rows)[:, None] + self.groups.corner_steps

    def corner_shares(self) -> Tensor:
        """Return the weights of the corners times the attention weights, (L * heads, 4, groups * points)."""
        samples = self.groups.corner_steps.shape[1]
        corners = self.weights.new_empty(self.weights.numel() // samples, 4, samples)
        upper, lower = self.weights * self.near[1], self.weights * self.far[1]
        pairs = ((upper, self.near[0]), (upper, self.far[0]), (lower, self.near[0]), (lower, self.far[0]))
        for corner, (vertical, horizontal) in enumerate(pairs):
            torch.mul(self._by_head(vertical), self._by_head(horizontal), out=corners[:, corner])
        return corners

    def gradients(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the locations, (L, N, 2), and of the weights, (L, N).

        Args:
            products: (L * heads, 4, groups * points), products of the corners' rows with the output's gradient.
        """
        near_x, near_y, far_x, far_y = (self._by_head(x) for x in (*self.near, *self.far))
        upper_left, upper_right, lower_left, lower_right = products.unbind(1)
        upper = torch.addcmul(upper_left * near_x, upper_right, far_x)
        lower = torch.addcmul(lower_left * near_x, lower_right, far_x)
        left = torch.addcmul(upper_left * near_y, lower_left, far_y)
        right = torch.addcmul(upper_right * near_y, lower_right, far_y)
        by_weight = torch.addcmul(upper * near_y, lower, far_y)
        by_location = self.weights.new_empty(*self.weights.shape, 2)
        for axis, (near, far) in enumerate(((left, right), (upper, lower))):
            near_slope, far_slope = self._slopes(axis)
            slope = torch.addcmul(near.view_as(near_slope) * near_slope, far.view_as(far_slope), far_slope)
            torch.mul(slope.mul_(self.weights), self.groups.sizes[axis], out=by_location[..., axis])
        return by_location, by_weight.view_as(self.weights)

    def _slopes(self, axis: int) -> tuple[Tensor, Tensor]:
        """Return the derivatives of near and far by the offset, (L, N) each; right-hand ones at a kink."""
        unit = self.offsets[axis].floor()
        before, within, after = ((unit == k).to(unit.dtype) for k in (-1, 0, 1))
        return before.sub_(within), within.sub(after).mul_(self.groups.has_far[axis])

    def _by_head(self, x: Tensor) -> Tensor:
        """Reshape (L, N) to (L * heads, groups * points)."""
        return x.view(-1, self.groups.corner_steps.shape[1])


def _multiply_rows(queries: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Multiply each query with its rows of the table.

    Args:
        queries: (Q, d).
        table: (R, d).
        rows: (Q, ...) int32.
    Returns:
        The dot products, in the shape of `rows`, in the table's dtype.
    """
    if rows[0].numel() > len(table):  # no row of a sparse matrix can have more entries than columns
        return (queries[:, None] * table).sum(-1).gather(1, rows.flatten(1).long()).view(rows.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")  # the functions used here are stable
        products = torch.sparse_csr_tensor(
            _equal_bounds(rows),
            rows.flatten(),
            table.new_zeros(rows.numel()),
            size=(len(queries), len(table)),
            check_invariants=False,
        )
    torch.sparse.sampled_addmm(products, queries, table.T, beta=0, out=products)
    return products.values().view(rows.shape)


def _add_value_gradients(
    grad_table: Tensor,
    grad_rows: Tensor,
    rows: Tensor,
    shares: Tensor,
    shapes: list[tuple[int, int]],
    levels: Sequence[int],
) -> None:
    """Add to each row of the table the weighted gradients of the queries that read it.

    Args:
        grad_table: (R, d), changed in place.
        grad_rows: (L * heads, d), gradients of the queries.
        rows: (L, heads, groups, points) int32, table row of each cell's first corner.
        shares: (L, heads, 4, groups, points), weights of the corners.
    """
    heads, points = rows.shape[1], rows.shape[3]
    first_pixels = _first_pixels(shapes)
    for group, level in enumerate(levels):
        height, width = shapes[level]
        start, count = first_pixels[level] * heads, height * width * heads
        # One sort serves a cell's four corners, since the same queries read them: the sums for a corner are those of
        # the cells, moved by a number of rows.
        sorted_rows, order = (rows[:, :, group] - start).flatten().sort()
        bounds = torch.searchsorted(sorted_rows, torch.arange(count + 1, dtype=torch.int32), out_int32=True)
        order = order.int()
        readers = order // points
        target = grad_table[start : start + count]
        right, down = (width > 1) * heads, (height > 1) * width * heads
        for corner, step in enumerate((0, right, down, right + down)):
            corner_shares = shares[:, :, corner, group].flatten().index_select(0, order)
            target[step:] += _embedding_bag(grad_rows, readers, bounds, corner_shares)[: count - step]


def _first_pixels(shapes: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of pixels on the levels before each."""
    return list(itertools.accumulate((height * width for height, width in shapes[:-1]), initial=0))


def _equal_bounds(rows: Tensor) -> Tensor:
    """Return the boundaries of bags of equal size: (bags, ...) -> (bags + 1,) int32."""
    return torch.arange(0, rows.numel() + 1, rows[0].numel(), dtype=torch.int32)


def _embedding_bag(table: Tensor, rows: Tensor, bounds: Tensor, weights: Tensor) -> Tensor:
    """Return (bags, d): sums of `table[rows] * weights` between consecutive bounds."""
    return F.embedding_bag(rows, table, bounds, mode="sum", per_sample_weights=weights, include_last_offset=True)
