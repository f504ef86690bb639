"""Shared parts of the pages of semantic and panoptic maps: images of errors, and confusions of classes."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitkit.apps.report.sections import (
    ConfusionMatrix,
    Gallery,
    Image,
    Overlay,
    PixelOverlay,
    Section,
    number,
    rank_samples,
)
from vitkit.evaluation.bootstrap import SampleStatistics
from vitkit.evaluation.sample_statistics import SemanticStatistics
from vitkit.structures import IGNORE_INDEX

_RANKED = 6
_MAX_CELLS, _MAX_IMAGES, _LONG_SIDE = 40, 3, 300
_IMAGES = "Truth, prediction, and where they differ (red; pixels that do not count are black)."
_CONFUSION = (
    "Percentage of the true class's pixels; rows are true classes, columns predicted ones. Choose a cell to see its "
    "pixels in red, in the images with the most of them."
)


class MapPair(NamedTuple):
    """The maps of an image."""

    truth: np.ndarray
    """(H, W) uint8 labels, `IGNORE_INDEX` for none."""
    predicted: np.ndarray
    overlays: tuple[Overlay, Overlay]
    """Drawings of both."""


def error_image(index: int, pair: MapPair, text: str) -> Image:
    """Return an image that shows where a map is wrong."""
    ignored = pair.truth == IGNORE_INDEX
    return Image(index, text, PixelOverlay((pair.truth != pair.predicted) & ~ignored, ignored))


def confusion_section(statistics: SemanticStatistics, matrix: np.ndarray, pair_of: Callable[[int], MapPair]) -> Section:
    """Return the section of the confusion matrix; a cell shows the images with the most pixels of its confusion.

    Args:
        matrix: (C, C + 1) pixel counts: rows true, columns predicted, the last column no prediction.
        pair_of: returns the maps of the image with this index.
    """
    missed = statistics.true - statistics.correct
    names = [*statistics.class_names, "(nothing)"]

    def images_of(row: int, column: int) -> Iterator[Image]:
        worth = statistics.correct[:, row] if row == column else missed[:, row]
        for k in np.argsort(-worth, kind="stable")[: 2 * _MAX_IMAGES].tolist():
            if not worth[k]:
                continue
            truth, predicted, _ = pair_of(k)
            chosen = (truth == row) & (np.minimum(predicted, len(matrix)) == column)
            if chosen.any():
                part = 100 * chosen.sum() / max((truth == row).sum(), 1)
                text = f"{statistics.sample_ids[k]}: {part:.1f} % of {names[row]} is {names[column]}"
                yield Image(k, text, PixelOverlay(chosen))

    confusions = ConfusionMatrix(
        matrix,
        statistics.class_names,
        images_of,
        percent=True,
        max_cells=_MAX_CELLS,
        max_images=_MAX_IMAGES,
        long_side=_LONG_SIDE,
    )
    return Section("Confusion matrix", [confusions], _CONFUSION)


def images_section(statistics: SampleStatistics, pair_of: Callable[[int], MapPair]) -> Section:
    """Return the images with the lowest and the highest values, each with truth, prediction and errors."""
    metric = statistics.sample_scores()[0]
    values, titles = rank_samples(statistics, _RANKED)

    def groups(indices: Sequence[int]) -> Iterator[list[Image]]:
        for k in indices:
            pair, text = pair_of(k), f"{statistics.sample_ids[k]}: {metric} {number(values[k])}"
            truth, prediction = (
                Image(k, f"{text}, {what}", overlay) for what, overlay in zip(("truth", "prediction"), pair.overlays)
            )
            yield [truth, prediction, error_image(k, pair, f"{text}, errors")]

    return Section("Images", [Gallery(title, groups(indices)) for title, indices in titles], _IMAGES)
