"""The sections of the reports of semantic and of panoptic maps."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vitkit.apps.report.sections import (
    Alert,
    ConfusionMatrix,
    Gallery,
    Image,
    Overlay,
    PanopticOverlay,
    PixelOverlay,
    Section,
    SemanticOverlay,
    Table,
    intervals_note,
    number,
    overall_section,
    ranked_titles,
    resampled,
    value_rows,
)
from vitkit.evaluation.bootstrap import SampleStatistics, estimate
from vitkit.evaluation.maps import boundary_counts
from vitkit.evaluation.sample_statistics import PanopticStatistics, SemanticStatistics
from vitkit.structures import IGNORE_INDEX, PanopticMap

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


def semantic_pair(truth: np.ndarray, predicted: np.ndarray, class_names: Sequence[str]) -> MapPair:
    """Return the maps of an image, from (H, W) uint8 labels."""
    return MapPair(truth, predicted, (SemanticOverlay(truth, class_names), SemanticOverlay(predicted, class_names)))


def panoptic_pair(truth: PanopticMap, predicted: PanopticMap, class_names: Sequence[str]) -> MapPair:
    """Return the maps of an image, from its segments."""
    overlays = PanopticOverlay(truth, class_names), PanopticOverlay(predicted, class_names)
    return MapPair(label_map(truth), label_map(predicted), overlays)


def error_image(index: int, pair: MapPair, text: str) -> Image:
    """Return an image that shows where a map is wrong."""
    ignored = pair.truth == IGNORE_INDEX
    return Image(index, text, PixelOverlay((pair.truth != pair.predicted) & ~ignored, ignored))


def semantic_sections(
    statistics: SemanticStatistics, matrix: np.ndarray, pair_of: Callable[[int], MapPair], alerts: Sequence[Alert]
) -> list[Section]:
    """Return the sections of a report.

    Args:
        matrix: (C, C + 1) pixel counts: rows true, columns predicted, the last column no prediction.
        pair_of: returns the maps of the image with this index.
        alerts: warnings about missing predictions.
    """
    _, scores = resampled(statistics)
    columns = [name for name in ("IoU", "boundary IoU", "accuracy") if name in next(iter(scores.by_class.values()))]
    shares = (100 * statistics.true.sum(axis=0) / max(statistics.true.sum(), 1)).tolist()
    rows = [[*row, share] for row, share in zip(value_rows(scores.by_class, columns), shares)]
    return [
        overall_section(scores.overall, *alerts),
        Section("Classes", [Table(("class", *columns, "% of pixels"), rows)]),
        Section("Confusion matrix", [_confusions(statistics, matrix, pair_of)], _CONFUSION),
        _images(statistics, pair_of),
    ]


def panoptic_sections(
    statistics: PanopticStatistics, pair_of: Callable[[int], MapPair], alerts: Sequence[Alert]
) -> list[Section]:
    """Return the sections of a report; arguments as in `semantic_sections`."""
    weights, scores = resampled(statistics)
    names = statistics.class_names
    of_pixels, matrix = pixel_statistics(statistics.sample_ids, names, pair_of)
    pixel_scores = of_pixels.scores(weights)
    by_class = {name: {**values, **pixel_scores.by_class[name]} for name, values in scores.by_class.items()}
    columns = ("PQ", "SQ", "RQ", "IoU", "boundary IoU")
    segments = statistics.matches[:, :, [1, 3]].sum(axis=(0, 2)).astype(int)
    counts = {name: int(n) for name, n in zip(names, segments)}
    overall = [
        [name, *(estimate(scores.overall[f"{metric}{suffix}"]) for metric in ("PQ", "SQ", "RQ"))]
        for name, suffix in (("all", ""), ("things", "_things"), ("stuff", "_stuff"))
    ]
    pixels = [[name, estimate(values)] for name, values in pixel_scores.overall.items()]
    tables = [Table(("", "PQ", "SQ", "RQ"), overall), Table(("of pixels, by class", "value"), pixels)]
    return [
        Section("Panoptic quality", [*alerts, *tables], intervals_note()),
        Section("Classes", [Table(("class", "segments", *columns), value_rows(by_class, columns, counts))]),
        Section("Confusion matrix", [_confusions(of_pixels, matrix, pair_of)], _CONFUSION),
        _images(statistics, pair_of),
    ]


def label_map(segments: PanopticMap) -> np.ndarray:
    """Return the (H, W) uint8 class of each pixel, `IGNORE_INDEX` outside all segments."""
    labels = np.full(segments.panoptic.shape, IGNORE_INDEX, np.uint8)
    for segment in segments.segments_info:
        labels[segments.panoptic == segment["id"]] = segment["label"]
    return labels


def pixel_statistics(
    ids: Sequence, class_names: Sequence[str], pair_of: Callable[[int], MapPair]
) -> tuple[SemanticStatistics, np.ndarray]:
    """Count the pixels of panoptic maps by class.

    Returns:
        each image's contribution to IoU and boundary IoU, and (C, C + 1) pixel counts: rows true, columns predicted,
        the last column no prediction.
    """
    num_classes = len(class_names)
    counts, boundaries = np.zeros((2, len(ids), 3, num_classes))
    total = np.zeros((num_classes, num_classes + 1), np.int64)
    for k in range(len(ids)):
        truth, predicted, _ = pair_of(k)
        labeled = truth != IGNORE_INDEX
        codes = truth[labeled].astype(np.int64) * (num_classes + 1) + np.minimum(predicted[labeled], num_classes)
        matrix = np.bincount(codes, minlength=total.size).reshape(total.shape)
        counts[k] = matrix.diagonal(), matrix[:, :-1].sum(axis=0), matrix.sum(axis=1)
        boundaries[k] = boundary_counts(truth, predicted, num_classes)
        total += matrix
    return SemanticStatistics(list(ids), class_names, *counts.transpose(1, 0, 2), boundaries), total


def _confusions(
    statistics: SemanticStatistics, matrix: np.ndarray, pair_of: Callable[[int], MapPair]
) -> ConfusionMatrix:
    """Return the confusion matrix; a cell shows the images with the most pixels of its confusion."""
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

    return ConfusionMatrix(
        matrix,
        statistics.class_names,
        images_of,
        percent=True,
        max_cells=_MAX_CELLS,
        max_images=_MAX_IMAGES,
        long_side=_LONG_SIDE,
    )


def _images(statistics: SampleStatistics, pair_of: Callable[[int], MapPair]) -> Section:
    """Return the images with the lowest and the highest values, each with truth, prediction and errors."""
    metric = statistics.sample_scores()[0]
    values, titles = ranked_titles(statistics, _RANKED)

    def groups(indices: Sequence[int]) -> Iterator[list[Image]]:
        for k in indices:
            pair, text = pair_of(k), f"{statistics.sample_ids[k]}: {metric} {number(values[k])}"
            truth, prediction = (
                Image(k, f"{text}, {what}", overlay) for what, overlay in zip(("truth", "prediction"), pair.overlays)
            )
            yield [truth, prediction, error_image(k, pair, f"{text}, errors")]

    return Section("Images", [Gallery(title, groups(indices)) for title, indices in titles], _IMAGES)
