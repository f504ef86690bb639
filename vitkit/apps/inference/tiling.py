"""Cut images into overlapping tiles."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitkit.errors import ConfigError

MIN_SIZE = 16
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
    """Settings of cutting images into tiles."""

    size: int
    """Height and width of a tile in pixels of the image."""
    overlap: int | None = None
    """The smallest overlap of neighboring tiles in pixels; None: a quarter of `size`. An object no larger than this
    lies completely in at least one tile; a larger one may be merged from its parts."""

    def __post_init__(self) -> None:
        if self.size < MIN_SIZE:
            raise ConfigError(f"tiles: a size of {self.size} pixels; expected at least {MIN_SIZE}.")
        if not 0 <= self.shared <= self.size // 2:
            raise ConfigError(
                f"tiles: an overlap of {self.shared} pixels; expected 0 to {self.size // 2}, half of one."
            )

    @property
    def shared(self) -> int:
        """The overlap in pixels."""
        return self.size // 4 if self.overlap is None else self.overlap

    def tiles(self, height: int, width: int) -> list[Tile]:
        """Return evenly spaced tiles of an image; consecutive tiles are neighbors along its shorter side."""
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
        return [int(start) for start in np.linspace(0, length - self.size, count).round()]


def make_tiling(tiles: Any) -> Tiling | None:
    """Return how images are cut: a number of pixels stands for the `Tiling` with tiles of this size; None: not at all.

    Raises:
        ConfigError: it is neither.
    """
    if tiles is None or isinstance(tiles, Tiling):
        return tiles
    if isinstance(tiles, bool) or not isinstance(tiles, Integral):
        raise ConfigError(f"tiles={tiles!r}: expected a number of pixels, or a Tiling.")
    return Tiling(int(tiles))


class TileResult(NamedTuple):
    """The predictions of a model in one tile."""

    fields: dict[str, Any]
    """What `postprocess` returned, in pixels of the tile."""
    class_scores: Iterable[tuple[range, Tensor]] | None
    """Pairs of a range of the tile's rows and the class scores (C, rows, w) of their pixels; None if the model makes no
    semantic map."""
