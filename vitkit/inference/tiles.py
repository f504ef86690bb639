"""Predict in tiles on images that are much larger than those a model was trained on."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.inference.merging import MapMerger, ObjectMerger, PanopticMerger

LEAST_SIZE = 16
"""The smallest side of a tile in pixels."""


class Tile(NamedTuple):
    """A rectangle of an image, in pixels."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def rows(self) -> slice:
        """The tile's rows in the image."""
        return slice(self.top, self.bottom)

    @property
    def columns(self) -> slice:
        """The tile's columns in the image."""
        return slice(self.left, self.right)

    def intersection(self, other: "Tile") -> "Tile | None":
        """Return the overlap of two tiles; None if they do not overlap."""
        common = Tile(*map(max, self[:2], other[:2]), *map(min, self[2:], other[2:]))
        return common if common.top < common.bottom and common.left < common.right else None


@dataclass(frozen=True)
class Tiling:
    """How images are cut into tiles."""

    size: int
    """Height and width of a tile in pixels of the image."""
    overlap: int | None = None
    """The smallest overlap of neighbouring tiles in pixels; None: a quarter of `size`. An object no larger than this
    lies completely in at least one tile; a larger one may be merged from its parts."""

    def __post_init__(self) -> None:
        if self.size < LEAST_SIZE:
            raise ConfigError(f"tiles: a size of {self.size} pixels; expected at least {LEAST_SIZE}.")
        if not 0 <= self.shared <= self.size // 2:
            raise ConfigError(
                f"tiles: an overlap of {self.shared} pixels; expected 0 to {self.size // 2}, half of one."
            )

    @property
    def shared(self) -> int:
        """The overlap in pixels."""
        return self.size // 4 if self.overlap is None else self.overlap

    def tiles(self, height: int, width: int) -> list[Tile]:
        """Return evenly spaced tiles of an image; consecutive tiles are neighbours along its shorter side."""
        tiles = [
            Tile(top, left, min(top + self.size, height), min(left + self.size, width))
            for top in self._starts(height)
            for left in self._starts(width)
        ]
        return tiles if width <= height else sorted(tiles, key=lambda tile: tile.left)

    def _starts(self, length: int) -> list[int]:
        if length <= self.size:
            return [0]
        count = math.ceil((length - self.shared) / (self.size - self.shared))
        return np.linspace(0, length - self.size, count).round().astype(int).tolist()


class TileResult(NamedTuple):
    """What a model predicted in one tile."""

    fields: dict[str, Any]
    """What `postprocess` returned, in pixels of the tile."""
    class_scores: Iterable[tuple[range, Tensor]] | None
    """Pairs of a range of the tile's rows and the class scores (C, rows, w) of their pixels; None if the model makes no
    semantic map."""


def predict_tiles(
    image: np.ndarray,
    tiling: Tiling,
    predict: Callable[[list[np.ndarray]], Sequence[TileResult]],
    *,
    batch_size: int = 1,
) -> dict[str, Any]:
    """Predict on an image in tiles, and merge the predictions of all tiles.

    Boxes and masks that two tiles predict for one object become one (see `ObjectMerger`), the scores of pixels are
    averaged where tiles overlap (`MapMerger`), and segments that lie in several tiles are joined (`PanopticMerger`).
    Memory holds the merged result, `batch_size` tiles, and, for a semantic map, the scores of the pixels that are still
    to be averaged.

    Args:
        image: (H, W, 3) uint8 RGB.
        tiling: how to cut the image.
        predict: predicts on pictures (h, w, 3) of one size.
        batch_size: the number of tiles in a batch.
    Returns:
        what a model's `postprocess` returns, in pixels of the image.
    Raises:
        ConfigError: the model predicts neither boxes, nor masks, nor maps.
    """
    size = image.shape[:2]
    tiles = tiling.tiles(*size)
    mergers: list[ObjectMerger | MapMerger | PanopticMerger] = []
    for start in range(0, len(tiles), batch_size):
        chosen = tiles[start : start + batch_size]
        results = predict([image[tile.rows, tile.columns] for tile in chosen])
        for tile, result in zip(chosen, results):
            mergers = mergers or _mergers(result, tiles, size)
            for merger in mergers:
                merger.add(tile, result)
    return {name: value for merger in mergers for name, value in merger.result().items()}


def _mergers(result: TileResult, tiles: list[Tile], size: tuple[int, int]) -> list[Any]:
    """Return a merger for each kind of prediction in the result of a tile."""
    mergers = []
    if "boxes_xyxy" in result.fields:
        mergers.append(ObjectMerger(size))
    if result.class_scores is not None:
        mergers.append(MapMerger(size, tiles))
    if "panoptic" in result.fields:
        mergers.append(PanopticMerger(size))
    if not mergers:
        raise ConfigError(
            f"tiles: are for boxes, masks and maps, which can be merged; the model predicts {', '.join(result.fields)}."
        )
    return mergers
