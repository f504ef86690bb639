"""Converts queries' classes and masks to semantic maps, instances and panoptic maps, in bands of rows or query chunks.

Predicted masks are upsampled to the padded input, cropped to the image in it, and resized to the original image, always
bilinearly, as in the originals. At 2048x2048, all masks at once would take gigabytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_VALUES = 1 << 22
"""Number of values in the largest intermediate tensor, 16 MiB in float32: one that fits caches takes half the
time of one of 128 MiB, and less memory."""


class PanopticRules(NamedTuple):
    """Rules for which queries become segments of a panoptic map, and which pixels they get."""

    object_threshold: float = 0.8
    """Class probability that a query has to exceed."""
    overlap_threshold: float = 0.8
    """Minimum fraction of its mask that a segment must keep."""
    cut_masks: bool = True
    """Whether pixels outside a segment's own mask are void (Mask2Former) rather than the segment's (MaskFormer)."""


class Geometry(NamedTuple):
    """Sizes (height, width) of one image on the way back to its original."""

    padded: tuple[int, int]
    """Size that the predicted masks cover."""
    image: tuple[int, int]
    """Size of the image's part of it, at the top left."""
    original: tuple[int, int]
    """Size of the image as stored."""


def geometry_of(outputs: Mapping[str, Any], index: int, original: Sequence[int]) -> Geometry:
    """Return the sizes of one image in a batch."""
    return Geometry(outputs["input_size"], tuple(outputs["image_sizes"][index].tolist()), tuple(original))


def upsample(masks: Tensor, geometry: Geometry) -> Tensor:
    """Upsample (N, h, w) logits to (N, H, W) of the original image."""
    height, width = geometry.image
    masks = resize(masks, geometry.padded)[:, :height, :width]
    return resize(masks, geometry.original)


def resize(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bilinearly, (N, h, w) -> (N, *size)."""
    if maps.shape[-2:] == size or not len(maps):
        return maps.new_zeros(0, *size) if not len(maps) else maps
    return F.interpolate(maps[None], size=size, mode="bilinear", align_corners=False)[0]


def resize_rows(
    maps: Tensor, size: tuple[int, int], rows: range, *, first_row: int = 0, height: int | None = None
) -> Tensor:
    """Compute only the given rows of `resize(maps, size)`.

    Args:
        maps: (N, h, w), or a band of its rows.
        rows: rows of the result.
        first_row: the row of the full map at which `maps` begins.
        height: height of the full map; None: `maps` is the full map.
    Returns:
        (N, len(rows), W).
    """
    upper, lower, share = source_rows(rows, size[0], height or maps.shape[1], maps.device)
    band = torch.lerp(maps[:, upper - first_row], maps[:, lower - first_row], share[:, None].to(maps.dtype))
    return resize(band, (len(rows), size[1]))


def source_rows(rows: range, new_height: int, height: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each of `rows`, the two rows of a map of `height` to interpolate, and the weight of the lower one."""
    y = (torch.arange(rows.start, rows.stop, dtype=torch.float32, device=device) + 0.5) * (height / new_height) - 0.5
    y = y.clamp(0, height - 1)
    upper = y.floor().long()
    return upper, (upper + 1).clamp(max=height - 1), y - upper


def semantic_scores(
    probabilities: Tensor, masks: Tensor, geometry: Geometry, *, resize_masks: bool, within: range | None = None
) -> Iterator[tuple[range, Tensor]]:
    """Yield class scores of the original image's pixels, a band of rows at a time.

    Args:
        probabilities: (Q, C), without "no object".
        masks: (Q, h, w) logits.
        resize_masks: resize masks to the original image before the classes are summed (as in panoptic models),
            rather than the sums.
        within: the rows of the original image to score; None: all.
    Yields:
        the rows, and (C, rows, W) float32 scores.
    """
    for rows, band, options in _bands(masks, geometry, max(probabilities.shape), within):
        if resize_masks:
            yield rows, _sum_over_queries(probabilities, resize_rows(band, **options))
        else:
            yield rows, resize_rows(_sum_over_queries(probabilities, band), **options)


def _sum_over_queries(probabilities: Tensor, masks: Tensor) -> Tensor:
    """Sum the classes over queries: (Q, C) and logits (Q, h, w) -> (C, h, w)."""
    # Models are evaluated under autocast, but rounding to half precision could decide between classes of similar
    # scores.
    with torch.autocast(masks.device.type, enabled=False):
        return torch.einsum("qc,qhw->chw", probabilities, masks.sigmoid())


class WindowMasks(NamedTuple):
    """A model's prediction for one window of an image."""

    probabilities: Tensor
    """(Q, C), without "no object"."""
    masks: Tensor
    """(Q, h, w) logits."""
    top: int
    left: int
    """Column of the image at which the window begins, in pixels; `top` is its row."""


def merge_window_scores(
    windows: Sequence[WindowMasks], geometry: Geometry, *, within: range | None = None
) -> Iterator[tuple[range, Tensor]]:
    """Yield class scores of the original image's pixels from windows that cover the image, averaged where they overlap.

    Args:
        windows: in any order.
        geometry: its `padded` is the size of a window, which may extend beyond the image.
        within: the rows of the original image to score; None: all.
    Yields:
        the rows, and (C, rows, W) float32 scores.
    """
    window, (height, width), original = geometry
    num_queries, num_classes = windows[0].probabilities.shape
    step = max(1, CHUNK_VALUES // (max(window[1], width, original[1]) * max(num_queries, num_classes)))
    within = within if within is not None else range(original[0])
    for start in range(within.start, within.stop, step):
        rows = range(start, min(start + step, within.stop))
        upper, lower, _ = source_rows(rows, original[0], height, windows[0].masks.device)
        needed = range(int(upper[0]), int(lower[-1]) + 1)
        sums = windows[0].masks.new_zeros(num_classes, len(needed), width)
        counts = sums.new_zeros(len(needed), width)
        for probabilities, masks, top, left in windows:
            covered = range(max(needed.start, top), min(needed.stop, top + window[0]))
            if not len(covered):
                continue
            band = resize_rows(masks, window, range(covered.start - top, covered.stop - top))[:, :, : width - left]
            y, x = slice(covered.start - needed.start, covered.stop - needed.start), slice(left, left + band.shape[2])
            sums[:, y, x] += _sum_over_queries(probabilities, band)
            counts[y, x] += 1
        yield rows, resize_rows(sums / counts, original, rows, first_row=needed.start, height=height)


def upsample_in_bands(
    maps: Tensor, geometry: Geometry, *, within: range | None = None
) -> Iterator[tuple[range, Tensor]]:
    """Yield `upsample(maps, geometry)`, a band of rows at a time.

    Args:
        maps: (N, h, w).
        within: the rows of the original image to yield; None: all.
    Yields:
        the rows, and (N, rows, W).
    """
    for rows, band, options in _bands(maps, geometry, len(maps), within):
        yield rows, resize_rows(band, **options)


def _bands(
    maps: Tensor, geometry: Geometry, depth: int, within: range | None
) -> Iterator[tuple[range, Tensor, dict[str, Any]]]:
    """Yield rows of the original image, the rows that they are computed from in the last resizing, and the options of
    `resize_rows` for it; `depth` maps of a band are in memory at once."""
    (height, width), (new_height, new_width) = geometry.image, geometry.original
    step = max(1, CHUNK_VALUES // (max(geometry.padded[1], new_width) * depth))
    within = within if within is not None else range(new_height)
    for start in range(within.start, within.stop, step):
        rows = range(start, min(start + step, within.stop))
        upper, lower, _ = source_rows(rows, new_height, height, maps.device)
        first_row = int(upper[0])
        needed = range(first_row, int(lower[-1]) + 1)
        band = resize_rows(maps, geometry.padded, needed)[:, :, :width]
        yield rows, band, dict(size=geometry.original, rows=rows, first_row=first_row, height=height)


def semantic_map(probabilities: Tensor, masks: Tensor, geometry: Geometry, *, resize_masks: bool) -> Tensor:
    """Return (H, W) int64, the class of every pixel of the original image; arguments as in `semantic_scores`."""
    bands = semantic_scores(probabilities, masks, geometry, resize_masks=resize_masks)
    return torch.cat([scores.argmax(0) for _, scores in bands])


def query_chunks(masks: Tensor, geometry: Geometry) -> Iterator[tuple[slice, Tensor]]:
    """Yield masks (N, h, w) at the original size, a few at a time."""
    for chosen in chunks(len(masks), geometry):
        yield chosen, upsample(masks[chosen], geometry)


def chunks(count: int, sizes: Iterable[tuple[int, int]]) -> Iterator[slice]:
    """Yield slices of `count` masks: as many as may be in memory at the largest of `sizes` (height, width)."""
    step = max(1, CHUNK_VALUES // max(height * width for height, width in sizes))
    for start in range(0, count, step):
        yield slice(start, start + step)


def upsample_to_masks(masks: Tensor, geometry: Geometry, *, probabilities: bool = False) -> Tensor:
    """Resize mask logits (N, h, w) to (N, H, W) bool of the original image.

    Args:
        probabilities: whether their probabilities are resized (D-FINE-seg) rather than the logits themselves.
    """
    if probabilities:
        masks = masks.sigmoid() - 0.5
    sizes = zip(masks.shape[-2:], geometry.image, geometry.padded)
    (height, below), (width, right) = [divmod(n * side, padded) for n, side, padded in sizes]
    if not (below or right):
        # As in the original, masks that end with the image are resized once. Others are first enlarged to its pixels.
        masks, geometry = masks[:, :height, :width], Geometry(*[geometry.original] * 3)
    full = torch.zeros(len(masks), *geometry.original, dtype=torch.bool, device=masks.device)
    for chunk, logits in query_chunks(masks, geometry):
        full[chunk] = logits > 0
    return full


class Instances(NamedTuple):
    """The instances in one image."""

    scores: Tensor
    """(N,) float32."""
    labels: Tensor
    """(N,) int64."""
    masks: Tensor
    """(N, H, W) bool, at the size of the original image."""


def instances(
    probabilities: Tensor, masks: Tensor, geometry: Geometry, *, things: Sequence[bool], num_instances: int
) -> Instances:
    """Return the best pairs of query and class as in Mask2Former: scores include the confidence of the masks.

    Args:
        probabilities: (Q, C), without "no object".
        masks: (Q, h, w) logits.
        things: for each class, whether it has instances; pairs of other classes are removed after the choice.
        num_instances: number of pairs to choose; they are returned in no particular order.
    """
    num_classes = probabilities.shape[1]
    scores, best = probabilities.flatten().topk(min(num_instances, probabilities.numel()), sorted=False)
    query, labels = best // num_classes, best % num_classes
    is_thing = torch.tensor(things, device=labels.device)[labels]
    scores, query, labels = scores[is_thing], query[is_thing], labels[is_thing]
    # A query may be chosen for several classes, but has only one mask.
    queries, position = query.unique(return_inverse=True)
    inside = torch.zeros(len(queries), *geometry.original, dtype=torch.bool, device=masks.device)
    confidence = torch.zeros(len(queries), device=masks.device)
    for chosen, logits in query_chunks(masks[queries], geometry):
        inside[chosen] = logits > 0
        sums = logits.sigmoid().mul_(inside[chosen]).flatten(1).sum(1)
        confidence[chosen] = sums / (inside[chosen].flatten(1).sum(1) + 1e-6)
    return Instances(scores * confidence[position], labels, inside[position])


class Panoptic(NamedTuple):
    """A panoptic map of one image, with its segments."""

    segment_ids: Tensor
    """(H, W) int32, at the size of the original image; 0 is void."""
    segments: list[dict]
    """id, label, score and is_thing of each segment."""


class Assignment(NamedTuple):
    """Assignment of each pixel of a panoptic map to one of N confident queries, before segments are dropped."""

    queries: Tensor
    """(N,) int64, indices of the queries."""
    scores: Tensor
    """(N,)."""
    labels: Tensor
    """(N,) int64."""
    owner: Tensor
    """(H, W) int64, index among the N of the query with the largest score times mask."""
    inside: Tensor
    """(H, W) bool, whether the pixel is inside its owner's mask."""
    areas: Tensor
    """(N,) int64, number of pixels in each mask."""
    owned: Tensor
    """(N,) int64, number of pixels assigned to each query."""

    def is_kept(self, rules: PanopticRules) -> list[bool]:
        """Return whether each query keeps enough of its mask to become a segment."""
        inside = self.owner[self.inside].bincount(minlength=len(self.queries)) if rules.cut_masks else self.owned
        shares = self.owned / self.areas.clamp(min=1)
        return ((self.areas > 0) & (inside > 0) & (shares >= rules.overlap_threshold)).tolist()


def panoptic(
    probabilities: Tensor, masks: Tensor, geometry: Geometry, *, things: Sequence[bool], rules: PanopticRules
) -> Panoptic:
    """Assign each pixel to the query with the most confident class and mask; drop segments that lose most of their
    mask.

    Args:
        probabilities: (Q, C + 1), the last class being "no object".
        masks: (Q, h, w) logits.
        things: for each class, whether it has instances; for other classes, all segments become one.
    """
    assigned = assign_pixels(probabilities, masks, geometry, rules=rules)
    segment_ids = torch.zeros(geometry.original, dtype=torch.int32, device=masks.device)
    segments, stuff = [], {}
    kept = assigned.is_kept(rules)
    for i, (label, score) in enumerate(zip(assigned.labels.tolist(), assigned.scores.tolist())):
        if not kept[i]:
            continue
        region = assigned.owner == i
        if rules.cut_masks:
            region &= assigned.inside
        if not things[label] and label in stuff:
            segment_ids[region] = stuff[label]
            continue
        segments.append(dict(id=len(segments) + 1, label=label, score=score, is_thing=bool(things[label])))
        segment_ids[region] = len(segments)
        if not things[label]:
            stuff[label] = len(segments)
    return Panoptic(segment_ids, segments)


def assign_pixels(probabilities: Tensor, masks: Tensor, geometry: Geometry, *, rules: PanopticRules) -> Assignment:
    """Assign each pixel of the original image to a confident query; arguments as in `panoptic`."""
    scores, labels = probabilities.max(-1)
    confident = (labels != probabilities.shape[1] - 1) & (scores > rules.object_threshold)
    scores, labels, masks = scores[confident], labels[confident], masks[confident]
    best = masks.new_full(geometry.original, -1.0)  # largest score times mask so far
    owner = torch.zeros(geometry.original, dtype=torch.int64, device=masks.device)
    inside = torch.zeros_like(owner, dtype=torch.bool)  # whether the pixel is inside its owner's mask
    areas = torch.zeros(len(masks), dtype=torch.int64, device=masks.device)
    for chosen, logits in query_chunks(masks, geometry):
        p = logits.sigmoid()
        areas[chosen] = (p >= 0.5).flatten(1).sum(1)
        value, index = (p * scores[chosen, None, None]).max(0)
        better = value > best
        best = torch.where(better, value, best)
        owner = torch.where(better, index + chosen.start, owner)
        inside = torch.where(better, p.gather(0, index[None])[0] >= 0.5, inside)
    owned = owner.flatten().bincount(minlength=len(masks))[: len(masks)]
    return Assignment(confident.nonzero()[:, 0], scores, labels, owner, inside, areas, owned)
