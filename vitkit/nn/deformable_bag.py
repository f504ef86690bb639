"""Deformable attention by PyTorch's operations on table rows: the path of the CPU.

The values are a table with a row per place and head. Every head of a query reads four rows per sample, the corners of
the cell around it, and sums them with weights: an embedding bag. Backward, the weights' gradients are products of the
same pairs of rows, and the values' gradients are bags again, of the queries that read a row.
"""

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 18
"""Samples worked on at a time: few enough for a processor's cache, enough for its threads."""


def attend(values: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor) -> Tensor:
    """See `deformable_attend`."""
    heads, channels = values.shape[2:]
    tables = _tables(values)
    maps = _Maps.of(shapes, weights, tables.dtype)
    output = values.new_empty(*weights.shape[:2], heads * channels)
    for image, table in enumerate(tables):
        for part in _parts(weights):
            samples = _Samples.of(locations[image, part], weights[image, part], maps)
            sums = _sum_bags(table, samples.corner_rows(), samples.corner_weights())
            output[image, part] = sums.view(-1, heads * channels)
    return output


def attend_backward(
    grad: Tensor, values: Tensor, shapes: list[tuple[int, int]], locations: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of values, locations and weights.

    Args:
        grad: (B, L, heads * d), the output's gradient; the rest are the inputs of `attend`.
    """
    heads, channels = values.shape[2:]
    tables = _tables(values)
    maps = _Maps.of(shapes, weights, tables.dtype)
    grad_tables = torch.zeros_like(tables)
    grad_locations = torch.empty_like(locations, memory_format=torch.contiguous_format)
    grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for image, table in enumerate(tables):
        grad_rows = grad[image].to(tables.dtype).reshape(-1, channels)
        readings = _Readings.empty(weights[image], tables.dtype) if _read_often(table, weights[image]) else None
        for part in _parts(weights):
            samples = _Samples.of(locations[image, part], weights[image, part], maps)
            rows, shares = samples.corner_rows(), samples.corner_weights()
            own_rows = grad_rows[part.start * heads : part.stop * heads]
            by_location, by_weight = samples.gradients(_multiply_rows(own_rows, table, rows))
            grad_locations[image, part] = by_location.view_as(grad_locations[image, part])
            grad_weights[image, part] = by_weight.view_as(grad_weights[image, part])
            if readings is None:
                _add_to_few(grad_tables[image], own_rows, rows, shares)
            else:
                readings.put(part, samples.rows, shares)
        if readings is not None:
            readings.add_to_all(grad_tables[image], grad_rows, shapes)
    return grad_tables.view_as(values).to(values.dtype), grad_locations, grad_weights


def _tables(values: Tensor) -> Tensor:
    """(B, S * heads, d), at least in float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).flatten(1, 2).contiguous()


def _parts(weights: Tensor) -> list[slice]:
    """The queries, some at a time."""
    queries, samples = weights.shape[1], weights.shape[2:].numel()
    step = max(1, CHUNK // max(1, samples))
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


class _Maps(NamedTuple):
    """What the samples of one query must know of the maps; N = heads * levels * points."""

    sizes: Tensor
    """(2, 1, N) width and height."""
    last: Tensor
    """(2, 1, N) column and row of the last cell, whose four corners are all inside."""
    first: Tensor
    """(N,) int32, the table's row of the map's first place."""
    steps: Tensor
    """(2, N) int32, table rows to the next place to the right and below; 0 if there is none."""
    corners: Tensor
    """(4, levels * points) int32, table rows from a cell's first corner to each."""
    thin: Tensor | None
    """(2, 1, N) bool, True where a map is only one place wide or high; None if none is."""

    @classmethod
    def of(cls, shapes: list[tuple[int, int]], weights: Tensor, dtype: torch.dtype) -> "_Maps":
        heads, levels, points = weights.shape[2:]
        heights, widths = torch.tensor(shapes, dtype=torch.int32).T
        areas = heights * widths
        first = (areas.cumsum(0) - areas) * heads + torch.arange(heads)[:, None]
        right, down = (widths > 1) * heads, (heights > 1) * widths * heads
        sizes = torch.stack((widths, heights))
        steps = torch.stack((right, down)).int()

        def spread(x: Tensor) -> Tensor:
            return x[..., None, :, None].expand(*x.shape[:-1], heads, levels, points).flatten(-3)

        return cls(
            sizes=spread(sizes)[:, None].to(dtype),
            last=spread((sizes - 2).clamp(min=0))[:, None].to(dtype),
            first=first.int()[..., None].expand(-1, -1, points).flatten(),
            steps=spread(steps),
            corners=torch.stack((right * 0, right, down, right + down)).int().repeat_interleave(points, -1),
            thin=spread(sizes == 1)[:, None] if bool((sizes == 1).any()) else None,
        )


class _Samples(NamedTuple):
    """The samples of some queries of one image. L queries, N = heads * levels * points."""

    rows: Tensor
    """(L, N) int32, table row of the first of four corners. At a map's border this is the nearest cell inside; the
    corners that a sample does not touch have no share in it."""
    offsets: Tensor
    """(2, L, N) x and y from the first corner."""
    near: Tensor
    """(2, L, N) share of the left and the upper corners."""
    far: Tensor
    """(2, L, N) share of the right and the lower corners."""
    weights: Tensor
    """(L, N)."""
    maps: _Maps

    @classmethod
    def of(cls, locations: Tensor, weights: Tensor, maps: _Maps) -> "_Samples":
        dtype = maps.sizes.dtype
        places = locations.flatten(1, -2).movedim(-1, 0).to(dtype).contiguous()
        places = (places * maps.sizes).sub_(0.5)
        cells = torch.clamp(places, torch.zeros_like(maps.last), maps.last).floor_()
        offsets = places.sub_(cells)
        # A location that is not a number must give nan, and not a row outside the table.
        x, y = cells.int().clamp_(min=0)
        rows = torch.addcmul(maps.first, x, maps.steps[0]).addcmul_(y, maps.steps[1])
        near = offsets.abs().neg_().add_(1).clamp_(min=0)
        far = (offsets - 1).abs_().neg_().add_(1).clamp_(min=0)
        if maps.thin is not None:
            far.masked_fill_(maps.thin, 0)
        return cls(rows, offsets, near, far, weights.flatten(1).to(dtype), maps)

    def corner_rows(self) -> Tensor:
        """(L * heads, 4, levels * points) int32."""
        return self._by_head(self.rows)[:, None] + self.maps.corners

    def corner_weights(self) -> Tensor:
        """(L * heads, 4, levels * points)."""
        samples = self.maps.corners.shape[1]
        corners = self.weights.new_empty(self.weights.numel() // samples, 4, samples)
        upper, lower = self.weights * self.near[1], self.weights * self.far[1]
        pairs = ((upper, self.near[0]), (upper, self.far[0]), (lower, self.near[0]), (lower, self.far[0]))
        for corner, (a, b) in enumerate(pairs):
            torch.mul(self._by_head(a), self._by_head(b), out=corners[:, corner])
        return corners

    def gradients(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of locations, (L, N, 2), and weights, (L, N).

        Args:
            products: (L * heads, 4, levels * points), of the corners' rows and the output's gradient.
        """
        near_x, near_y, far_x, far_y = (self._by_head(x) for x in (*self.near, *self.far))
        a, b, c, d = products.unbind(1)
        upper, lower = torch.addcmul(a * near_x, b, far_x), torch.addcmul(c * near_x, d, far_x)
        left, right = torch.addcmul(a * near_y, c, far_y), torch.addcmul(b * near_y, d, far_y)
        by_weight = torch.addcmul(upper * near_y, lower, far_y)
        by_location = self.weights.new_empty(*self.weights.shape, 2)
        for axis, (first, second) in enumerate(((left, right), (upper, lower))):
            near_slope, far_slope = self._slopes(axis)
            slope = torch.addcmul(first.view_as(near_slope) * near_slope, second.view_as(far_slope), far_slope)
            torch.mul(slope.mul_(self.weights), self.maps.sizes[axis], out=by_location[..., axis])
        return by_location, by_weight.view_as(self.weights)

    def _slopes(self, axis: int) -> tuple[Tensor, Tensor]:
        """(L, N) each: how near and far shares grow with the offset. At a kink, as it goes on."""
        unit = self.offsets[axis].floor()
        before, within, after = (torch.eq(unit, k, out=torch.empty_like(unit)) for k in (-1, 0, 1))
        far = within - after
        if self.maps.thin is not None:
            far.masked_fill_(self.maps.thin[axis], 0)
        return before.sub_(within), far

    def _by_head(self, x: Tensor) -> Tensor:
        """(L, N) -> (L * heads, levels * points)."""
        return x.view(-1, self.maps.corners.shape[1])


def _sum_bags(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of table rows.

    Args:
        table: (R, d).
        rows, weights: (bags, ...), the same number for each bag.
    Returns:
        (bags, d).
    """
    return _embedding_bag(table, rows.flatten(), _bounds(rows), weights.flatten())


def _bounds(rows: Tensor) -> Tensor:
    return torch.arange(0, rows.numel() + 1, rows[0].numel(), dtype=torch.int32)


def _multiply_rows(queries: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Product of each query with its rows of the table.

    Args:
        queries: (Q, d).
        table: (R, d).
        rows: (Q, ...) int32.
    Returns:
        like `rows`, in the table's type.
    """
    if rows[0].numel() > len(table):  # no sparse matrix has more entries in a row than columns
        return (queries[:, None] * table).sum(-1).gather(1, rows.flatten(1).long()).view(rows.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")  # what is used of it is stable
        products = torch.sparse_csr_tensor(
            _bounds(rows),
            rows.flatten(),
            table.new_zeros(rows.numel()),
            size=(len(queries), len(table)),
            check_invariants=False,
        )
    torch.sparse.sampled_addmm(products, queries, table.T, beta=0, out=products)
    return products.values().view(rows.shape)


def _read_often(table: Tensor, weights: Tensor) -> bool:
    """Whether an image's samples read most rows of its table, so that going through all rows pays."""
    return 2 * weights.numel() >= len(table)


def _add_to_few(grad_table: Tensor, grad_rows: Tensor, rows: Tensor, shares: Tensor) -> None:
    """Adds to the rows that queries read the gradients of these queries, weighted.

    Args:
        grad_table: (R, d), changed in place.
        grad_rows: (Q, d).
        rows: (Q, ...) int32.
        shares: (Q, ...).
    """
    read, order = rows.flatten().sort()
    read, counts = torch.unique_consecutive(read, return_counts=True)
    bounds = F.pad(counts.cumsum(0), (1, 0)).int()
    readers = order.int() // rows[0].numel()
    grad_table.index_add_(0, read, _embedding_bag(grad_rows, readers, bounds, shares.flatten().index_select(0, order)))


class _Readings(NamedTuple):
    """Who reads which rows of an image's table, by level, so that levels are sorted one after the other."""

    rows: Tensor
    """(levels, L, heads, points) int32, of the first of four corners."""
    shares: Tensor
    """(4, levels, L, heads, points)."""

    @classmethod
    def empty(cls, weights: Tensor, dtype: torch.dtype) -> "_Readings":
        queries, heads, levels, points = weights.shape
        rows = torch.empty(levels, queries, heads, points, dtype=torch.int32)
        return cls(rows, torch.empty(4, *rows.shape, dtype=dtype))

    def put(self, part: slice, rows: Tensor, shares: Tensor) -> None:
        levels, _, heads, points = self.rows.shape
        self.rows[:, part] = rows.view(-1, heads, levels, points).permute(2, 0, 1, 3)
        self.shares[:, :, part] = shares.view(-1, heads, 4, levels, points).permute(2, 3, 0, 1, 4)

    def add_to_all(self, grad_table: Tensor, grad_rows: Tensor, shapes: list[tuple[int, int]]) -> None:
        """Adds to every row of the table the gradients of the queries that read it, weighted.

        A cell's samples are found once, for all four corners, and read the same queries: each corner's sums are
        those of the cells, some rows on.

        Args:
            grad_table: (S * heads, d), changed in place.
            grad_rows: (L * heads, d).
        """
        heads, points = self.rows.shape[2:]
        start = 0
        for level, (height, width) in enumerate(shapes):
            count = height * width * heads
            read, order = (self.rows[level] - start).flatten().sort()
            bounds = torch.searchsorted(read, torch.arange(count + 1, dtype=torch.int32), out_int32=True)
            order = order.int()
            readers = order // points
            target = grad_table[start : start + count]
            right, down = (width > 1) * heads, (height > 1) * width * heads
            for corner, step in enumerate((0, right, down, right + down)):
                weights = self.shares[corner, level].flatten().index_select(0, order)
                target[step:] += _embedding_bag(grad_rows, readers, bounds, weights)[: count - step]
            start += count


def _embedding_bag(table: Tensor, rows: Tensor, bounds: Tensor, weights: Tensor) -> Tensor:
    """(bags, d): sums of `table[rows] * weights` between each two neighbours of `bounds`."""
    return F.embedding_bag(rows, table, bounds, mode="sum", per_sample_weights=weights, include_last_offset=True)
