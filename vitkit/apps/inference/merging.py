"""Merge the predictions of overlapping tiles into those of the image: objects, semantic maps, and panoptic maps."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torchvision.ops import box_area, box_iou

from vitkit.apps.inference.tiling import Tile, TileResult
from vitkit.evaluation.coco import masks_to_rle

logger = logging.getLogger("vitkit")

SAME = 0.5
"""The smallest IoU, within the overlap of two tiles, at which two predictions count as one object."""
INSIDE = 0.8
"""The smallest fraction of a part, cut off by its tile's border, that must lie in another tile's prediction for both to
count as one object."""
BORDER = 1 / 50
"""A tolerance as a fraction of a tile's size: a box this near to its tile's border counts as cut off, and a part may
extend beyond another box by as much and still count as inside it."""
MASK_BYTES = 4 << 30
"""The memory limit for the masks of merged objects in bytes; objects with the highest scores are kept."""


def connect(count: int, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the connected component of each of `count` nodes, (count,) int, given the pairs that are joined."""
    rows, columns = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(rows)), (rows, columns)), (count, count))
    return connected_components(graph, directed=False)[1]


@dataclass
class _TileObjects:
    """The N objects predicted in one tile."""

    tile: Tile
    first: int
    """The number of the tile's first object among those of all tiles."""
    scores: Tensor
    labels: Tensor
    boxes_xyxy: Tensor
    """(N, 4) in pixels of the image."""
    is_cut: Tensor
    """(N,) bool: the box reaches a border of the tile that is not a border of the image."""
    masks: list[dict[str, Any]] | None
    """COCO run lengths of the masks, of the tile's size; None if the model predicts no masks."""
    keypoints: Tensor | None = None
    """(N, K, 3) x, y in pixels of the image and confidence; None if the model predicts none."""

    def mask(self, index: int) -> np.ndarray:
        """Decode a mask, (h, w) bool of the tile's size."""
        return coco_mask.decode(self.masks[index]).astype(bool)


class ObjectMerger:
    """Merge boxes, and masks if there are any, so that each object has one.

    In two overlapping tiles, predictions of one class belong to one object if they agree within the overlap: the IoU of
    their masks, or of their boxes if there are no masks, is at least `SAME`. Each prediction has at most one partner,
    so that neighboring objects stay apart, and within a tile nothing is suppressed. A part that its tile cuts off also
    belongs to a prediction that it lies inside. An object in several tiles gets the highest score, and the box and mask
    of the best prediction that no tile cuts off, or the union of all parts if there is no such prediction; likewise its
    keypoints, of which each part gives those that it is most confident of.

    Args:
        size: (height, width) of the image.
    """

    def __init__(self, size: tuple[int, int]):
        self.size = size
        self.parts: list[_TileObjects] = []
        self.num_objects = 0
        self.same: list[tuple[int, int]] = []
        """Pairs of predictions that are one object, by their numbers among those of all tiles."""

    def add(self, tile: Tile, result: TileResult) -> None:
        """Add the predictions of a tile."""
        fields = result.fields
        boxes, masks = fields["boxes_xyxy"].float(), fields.get("masks")
        kept = (boxes[:, 2:] > boxes[:, :2]).all(1)
        if masks is not None:
            kept &= masks.flatten(1).any(1)
            masks = masks_to_rle(masks[kept])
        points = fields.get("keypoints")
        if points is not None:
            points = points[kept].float() + boxes.new_tensor([tile.left, tile.top, 0])
        boxes = boxes[kept] + boxes.new_tensor([tile.left, tile.top, tile.left, tile.top])
        part = _TileObjects(
            tile,
            self.num_objects,
            fields["scores"][kept].float(),
            fields["labels"][kept],
            boxes,
            self._is_cut(boxes, tile),
            masks,
            points,
        )
        for other in self.parts:
            common = tile.intersection(other.tile)
            if common is not None and len(boxes) and len(other.scores):
                self.same += [(other.first + a, part.first + b) for a, b in _partners(other, part, common)]
        self.parts.append(part)
        self.num_objects += len(boxes)

    def _is_cut(self, boxes: Tensor, tile: Tile) -> Tensor:
        near = _border(tile)
        height, width = self.size
        borders = (
            (tile.left > 0, boxes[:, 0] - tile.left),
            (tile.top > 0, boxes[:, 1] - tile.top),
            (tile.right < width, tile.right - boxes[:, 2]),
            (tile.bottom < height, tile.bottom - boxes[:, 3]),
        )
        return torch.stack([(distance <= near) & inner for inner, distance in borders]).any(0)

    def result(self) -> dict[str, Tensor]:
        """Return scores, labels, boxes_xyxy and, if there are any, masks, the highest score first."""
        members: dict[int, list[tuple[_TileObjects, int]]] = {}
        every = [(part, index) for part in self.parts for index in range(len(part.scores))]
        for group, pair in zip(connect(len(every), self.same).tolist(), every):
            members.setdefault(group, []).append(pair)
        merged = [(max(float(part.scores[i]) for part, i in group), group) for group in members.values()]
        merged.sort(key=lambda pair: -pair[0])
        has_masks = bool(self.parts) and self.parts[0].masks is not None
        if has_masks:
            merged = self._as_many_as_fit(merged)
        chosen = [_representatives(group) for _, group in merged]
        boxes = [torch.stack([part.boxes_xyxy[i] for part, i in group]) for group in chosen]
        result = {
            "scores": torch.tensor([score for score, _ in merged]),
            "labels": torch.tensor([int(group[0][0].labels[group[0][1]]) for group in chosen], dtype=torch.int64),
            "boxes_xyxy": torch.stack([torch.cat((b[:, :2].amin(0), b[:, 2:].amax(0))) for b in boxes])
            if boxes
            else torch.zeros(0, 4),
        }
        if self.parts and self.parts[0].keypoints is not None:
            # Of an object that every tile cuts off, each point is the one that a tile is most confident of.
            points = [torch.stack([part.keypoints[i] for part, i in group]) for group in chosen]
            best = [each[each[..., 2].argmax(0), torch.arange(each.shape[1])] for each in points]
            result["keypoints"] = torch.stack(best) if best else self.parts[0].keypoints[:0]
        if has_masks:
            result["masks"] = torch.zeros(len(chosen), *self.size, dtype=torch.bool)
            for mask, group in zip(result["masks"], chosen):
                for part, index in group:
                    mask[part.tile.rows, part.tile.columns] |= torch.from_numpy(part.mask(index))
        return result

    def _as_many_as_fit(self, merged: list[tuple[float, list]]) -> list[tuple[float, list]]:
        most = max(1, MASK_BYTES // (self.size[0] * self.size[1]))
        if len(merged) > most:
            logger.warning(
                "tiles: of %d objects the %d with the highest scores are kept, down to %.2f: masks of all would take "
                "%.0f GiB",
                len(merged),
                most,
                merged[most - 1][0],
                len(merged) * self.size[0] * self.size[1] / 2**30,
            )
        return merged[:most]


def _border(tile: Tile) -> float:
    return max(1.0, BORDER * max(tile.bottom - tile.top, tile.right - tile.left))


def _representatives(group: list[tuple[_TileObjects, int]]) -> list[tuple[_TileObjects, int]]:
    """Return the best prediction of an object that is not cut off, or all of its parts if all are.

    Predictions with less than half the highest score are ignored: a doubtful box may agree with a good one by chance.
    """
    best = max(float(part.scores[i]) for part, i in group)
    group = [(part, i) for part, i in group if float(part.scores[i]) >= best / 2]
    whole = [(part, i) for part, i in group if not part.is_cut[i]]
    return [max(whole, key=lambda pair: float(pair[0].scores[pair[1]]))] if whole else group


def _partners(a: _TileObjects, b: _TileObjects, common: Tile) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices into two tiles' objects that are one object, see `ObjectMerger`."""
    edges = a.boxes_xyxy.new_tensor([common.left, common.top, common.right, common.bottom])
    clipped_a, clipped_b = (_clip(part.boxes_xyxy, edges) for part in (a, b))
    reach = (box_area(clipped_a) > 0)[:, None] & (box_area(clipped_b) > 0)
    comparable = (a.labels[:, None] == b.labels) & reach
    similarity = torch.where(comparable, box_iou(clipped_a, clipped_b), torch.zeros(()))
    if a.masks is not None:
        _refine_by_masks(similarity, a, b, common)
    # Among several candidate pairs, those with high scores are matched first.
    weighted = similarity * (a.scores[:, None] * b.scores).sqrt()
    weighted[similarity < SAME] = 0
    free_a, free_b = torch.ones(len(a.scores), dtype=torch.bool), torch.ones(len(b.scores), dtype=torch.bool)
    rows, columns = weighted.nonzero(as_tuple=True)
    for k in weighted[rows, columns].argsort(descending=True, stable=True).tolist():
        i, j = int(rows[k]), int(columns[k])
        if free_a[i] and free_b[j]:
            free_a[i] = free_b[j] = False
            yield i, j
    near = max(_border(a.tile), _border(b.tile))
    fractions = _inside(clipped_a, clipped_b, near) * (comparable & (a.is_cut & free_a)[:, None])
    yield from _best_of_rows(fractions * (2 * b.scores >= a.scores[:, None]))
    fractions = _inside(clipped_b, clipped_a, near) * (comparable.T & (b.is_cut & free_b)[:, None])
    for j, i in _best_of_rows(fractions * (2 * a.scores >= b.scores[:, None])):
        yield i, j


def _best_of_rows(fractions: Tensor) -> list[tuple[int, int]]:
    values, columns = fractions.max(dim=1)
    return [(row, int(columns[row])) for row in (values >= INSIDE).nonzero()[:, 0].tolist()]


def _clip(boxes_xyxy: Tensor, edges: Tensor) -> Tensor:
    """Clip boxes to the rectangle `edges` (4,) xyxy; boxes outside it get zero area."""
    low, high = boxes_xyxy[:, :2].maximum(edges[:2]), boxes_xyxy[:, 2:].minimum(edges[2:])
    return torch.cat((low, high.maximum(low)), dim=1)


def _inside(a: Tensor, b: Tensor, margin: float) -> Tensor:
    """Return (N, M): the fraction of each box of `a` inside each box of `b`, enlarged by `margin` on all sides."""
    wider = b + b.new_tensor([-margin, -margin, margin, margin])
    low = a[:, None, :2].maximum(wider[None, :, :2])
    high = a[:, None, 2:].minimum(wider[None, :, 2:])
    return (high - low).clamp(min=0).prod(-1) / box_area(a).clamp(min=1e-6)[:, None]


def _refine_by_masks(similarity: Tensor, a: _TileObjects, b: _TileObjects, common: Tile) -> None:
    """Replace the IoU of overlapping boxes with the IoU of their masks within the overlap of the tiles."""
    decoded: dict[tuple[int, int], np.ndarray] = {}

    def inside(part: _TileObjects, index: int) -> np.ndarray:
        key = (id(part), index)
        if key not in decoded:
            top, left = part.tile.top, part.tile.left
            rows, columns = slice(common.top - top, common.bottom - top), slice(common.left - left, common.right - left)
            decoded[key] = part.mask(index)[rows, columns]
        return decoded[key]

    for i, j in (similarity > SAME / 4).nonzero().tolist():
        mask_a, mask_b = inside(a, i), inside(b, j)
        union = int((mask_a | mask_b).sum())
        similarity[i, j] = int((mask_a & mask_b).sum()) / union if union else 0.0


class MapMerger:
    """Merge semantic maps: the class of a pixel is that of its mean scores over all tiles that contain it.

    The borders of all tiles cut the image into cells. Scores are kept only for cells that lie in several tiles, and
    only until the last of these tiles has been added.

    Args:
        size: (height, width) of the image.
        tiles: all tiles, in the order in which they are added.
    """

    def __init__(self, size: tuple[int, int], tiles: Sequence[Tile]):
        self.semantic = torch.zeros(size, dtype=torch.int64)
        self.row_cuts = sorted({cut for tile in tiles for cut in (tile.top, tile.bottom)})
        self.column_cuts = sorted({cut for tile in tiles for cut in (tile.left, tile.right)})
        self.awaited: dict[tuple[int, int], int] = {}
        for tile in tiles:
            for rows, columns in self._cells(tile):
                self.awaited[rows[0], columns[0]] = self.awaited.get((rows[0], columns[0]), 0) + 1
        self.sums: dict[tuple[int, int], Tensor] = {}

    def _cells(self, tile: Tile) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield the cells in a tile, each as (first, end) of its rows and (first, end) of its columns."""
        rows = [cut for cut in pairwise(self.row_cuts) if tile.top <= cut[0] < tile.bottom]
        columns = [cut for cut in pairwise(self.column_cuts) if tile.left <= cut[0] < tile.right]
        return product(rows, columns)

    def add(self, tile: Tile, result: TileResult) -> None:
        """Add the scores of a tile's pixels."""
        cells = list(self._cells(tile))
        for rows, scores in result.class_scores:
            for (top, bottom), (left, right) in cells:
                first, end = max(top, tile.top + rows.start), min(bottom, tile.top + rows.stop)
                if first >= end:
                    continue
                within = slice(first - tile.top - rows.start, end - tile.top - rows.start)
                part = scores[:, within, left - tile.left : right - tile.left].cpu()
                if self.awaited[top, left] == 1 and (top, left) not in self.sums:
                    self.semantic[first:end, left:right] = part.argmax(0)
                    continue
                if (top, left) not in self.sums:
                    self.sums[top, left] = part.new_zeros(len(part), bottom - top, right - left)
                self.sums[top, left][:, first - top : end - top] += part
        for (top, bottom), (left, right) in cells:
            self.awaited[top, left] -= 1
            if self.awaited[top, left] == 0 and (top, left) in self.sums:
                self.semantic[top:bottom, left:right] = self.sums.pop((top, left)).argmax(0)

    def result(self) -> dict[str, Tensor]:
        """Return semantic (H, W) int64."""
        return {"semantic": self.semantic}


class PanopticMerger:
    """Merge the panoptic maps of all tiles into one.

    Where tiles overlap, a pixel takes its segment from the tile whose borders are farthest from it. Things of one class
    are joined if the IoU of their pixels within the overlap of two tiles is above `SAME`; all stuff of one class
    becomes one segment.

    Args:
        size: (height, width) of the image.
    """

    def __init__(self, size: tuple[int, int]):
        self.ids = np.zeros(size, np.int32)
        self.depth = np.zeros(size, np.int32)
        """(H, W) distance in pixels from each pixel to the border of the tile that its segment comes from."""
        self.segments: list[dict[str, Any]] = [{}]  # void
        self.same: list[tuple[int, int]] = []
        """Pairs of `segments` that are one thing."""
        self.stuff: dict[int, int] = {}
        self.tiles: list[Tile] = []

    def add(self, tile: Tile, result: TileResult) -> None:
        """Add the map of a tile."""
        segments = result.fields["segments_info"]
        lookup = np.zeros(max((s["id"] for s in segments), default=0) + 1, np.int32)
        for segment in segments:
            lookup[segment["id"]] = self._number(segment)
        ids = lookup[result.fields["panoptic"].numpy()]
        # A thing in several earlier tiles, which share its pixels, is compared as a whole.
        _, first, groups = np.unique(connect(len(self.segments), self.same), return_index=True, return_inverse=True)
        first = first[groups]
        for other in self.tiles:
            common = tile.intersection(other)
            if common is not None:
                new = ids[common.top - tile.top : common.bottom - tile.top]
                new = new[:, common.left - tile.left : common.right - tile.left]
                self._join_things(first[self.ids[common.rows, common.columns]], new)
        region = (tile.rows, tile.columns)
        depth = self._depth(tile)
        deeper = (ids > 0) & ((depth > self.depth[region]) | (self.ids[region] == 0))
        self.ids[region][deeper] = ids[deeper]
        self.depth[region][deeper] = depth[deeper]
        self.tiles.append(tile)

    def _number(self, segment: dict[str, Any]) -> int:
        """Return the number of a tile's segment in the image."""
        label, is_thing = segment["label"], segment.get("is_thing", True)
        if not is_thing and label in self.stuff:
            number = self.stuff[label]
            self.segments[number]["score"] = max(self.segments[number]["score"], segment["score"])
            return number
        self.segments.append(dict(segment))
        number = len(self.segments) - 1
        if not is_thing:
            self.stuff[label] = number
        return number

    def _join_things(self, old: np.ndarray, new: np.ndarray) -> None:
        base = len(self.segments)
        codes, counts = np.unique(old.astype(np.int64) * base + new, return_counts=True)
        olds, news = np.divmod(codes, base)
        areas_old, areas_new = np.bincount(olds, weights=counts), np.bincount(news, weights=counts)
        for a, b, count in zip(olds.tolist(), news.tolist(), counts.tolist()):
            if a and b:
                one, other = self.segments[a], self.segments[b]
                is_thing = one.get("is_thing", True) and other.get("is_thing", True)
                union = areas_old[a] + areas_new[b] - count
                if is_thing and one["label"] == other["label"] and count > SAME * union:
                    self.same.append((a, b))

    def _depth(self, tile: Tile) -> np.ndarray:
        """Return (h, w) int32, the distance of each pixel of a tile from those of its borders inside the image."""
        far = np.iinfo(np.int32).max

        def along(first: int, end: int, length: int) -> np.ndarray:
            pixels = np.arange(first, end, dtype=np.int32)
            low = pixels - first + 1 if first > 0 else np.full_like(pixels, far)
            return np.minimum(low, end - pixels if end < length else far)

        height, width = self.ids.shape
        rows, columns = along(tile.top, tile.bottom, height), along(tile.left, tile.right, width)
        return np.minimum(rows[:, None], columns[None])

    def result(self) -> dict[str, Any]:
        """Return panoptic (H, W) int32 and segments_info, with ids from 1."""
        groups = connect(len(self.segments), self.same)
        present = np.flatnonzero(np.bincount(groups[self.ids].ravel(), minlength=len(groups)))
        present = present[present > 0]
        new_ids = np.zeros(len(groups), np.int32)
        new_ids[present] = np.arange(1, len(present) + 1)
        segments = []
        for group in present.tolist():
            members = [self.segments[number] for number in np.flatnonzero(groups == group)]
            score = max(member["score"] for member in members)
            segments.append({**members[0], "id": int(new_ids[group]), "score": score})
        return {"panoptic": torch.from_numpy(new_ids[groups[self.ids]]), "segments_info": segments}
