"""The parts of a report as plain data: `pages` makes the sections of an evaluator, and `report` draws them.

Nothing here is HTML: all texts are plain, and images are an index into the dataset and what to draw on it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.report.intervals import Estimate, bootstrap_weights, estimate
from vitkit.evaluation.bootstrap import SampleStatistics, Scores
from vitkit.structures import PanopticMap
from vitkit.text_format import pluralize


class Change(NamedTuple):
    """The difference of a metric between two models."""

    difference: Estimate
    is_better: bool | None
    """Whether the model is better than the other; None: the difference is not significant."""


NUM_BINS = 10

Cell = str | int | float | Estimate | Change


class Table(NamedTuple):
    """Rows of cells, each beginning with its name."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    digits: int = 3


class Alert(NamedTuple):
    """A sentence that stands out as a warning."""

    text: str


class Text(NamedTuple):
    """A sentence."""

    text: str


class Curve(NamedTuple):
    """A named line; NaN leaves a gap in it."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


class LineChart(NamedTuple):
    """Curves in the unit square."""

    curves: Sequence[Curve]
    title: str
    x_title: str
    y_title: str
    marker: float | None = None
    """x of a vertical line."""


class Reliability(NamedTuple):
    """A reliability diagram: a bar for each bin of the scores, and the diagonal; all arrays are (bins,).

    NaN means that a bin is empty.
    """

    confidence: np.ndarray
    """Mean score."""
    accuracy: np.ndarray
    """Fraction correct, and its interval."""
    low: np.ndarray
    high: np.ndarray
    title: str
    y_title: str


class Bars(NamedTuple):
    """Horizontal bars with whiskers."""

    rows: Sequence[tuple[str, float, float, float]]
    """Name, value (at least 0), low and high ends of its interval."""
    title: str


class Details(NamedTuple):
    """Parts that are collapsed until the reader opens them."""

    summary: str
    parts: Sequence[Any]


class SemanticOverlay(NamedTuple):
    """Classes of pixels, drawn in colors on an image."""

    labels: np.ndarray
    """(H, W) uint8, `IGNORE_INDEX` for none."""
    class_names: Sequence[str]


class PanopticOverlay(NamedTuple):
    """Segments, drawn in colors on an image."""

    segments: PanopticMap
    class_names: Sequence[str]


class BoxOverlay(NamedTuple):
    """Predicted boxes, drawn on an image."""

    boxes_xyxy: np.ndarray
    """(N, 4) float, in pixels."""
    labels: np.ndarray
    scores: np.ndarray
    class_names: Sequence[str]


class PixelOverlay(NamedTuple):
    """Highlighted pixels of an image that is otherwise dimmed."""

    chosen: np.ndarray
    """(H, W) bool, drawn in red."""
    hidden: np.ndarray | None = None
    """(H, W) bool, drawn in black."""


Overlay = SemanticOverlay | PanopticOverlay | BoxOverlay | PixelOverlay


class Image(NamedTuple):
    """An image of the dataset, or one of the evaluator's own."""

    index: int | None
    """Index into the dataset."""
    text: str
    """What the image shows."""
    overlay: Overlay | None = None
    caption: Sequence[str] = ()
    """Lines to show below the image, the first in bold; empty: the text."""
    pixels: np.ndarray | None = None
    """(H, W, 3) uint8, in place of an image of the dataset."""


class Gallery(NamedTuple):
    """Images side by side; those of a group stay together. The images are loaded while the page is written."""

    title: str
    groups: Iterable[Sequence[Image]]
    long_side: int = 420
    """Size of the images in pixels."""


class ConfusionMatrix(NamedTuple):
    """A matrix whose cells open images."""

    counts: np.ndarray
    """(C, C) or (C, C + 1) int: rows true, columns predicted; column C + 1 means no prediction."""
    class_names: Sequence[str]
    images_of: Callable[[int, int], Iterable[Image]]
    """Returns the images of a cell, given its row and column."""
    percent: bool = False
    """Show cells as a percentage of their row."""
    max_cells: int = 60
    """Number of cells that have images, the most frequent ones."""
    max_images: int = 6
    """Number of images in a cell."""
    long_side: int = 220
    """Size of these images in pixels."""


class Section(NamedTuple):
    """A part of a page with a heading."""

    title: str
    parts: Sequence[Any]
    """Tables, charts, galleries and the other kinds of parts of this file."""
    note: str = ""
    """A sentence in smaller print below the heading."""


def number(value: float, digits: int = 3) -> str:
    """Return a number as text; "–" for NaN and infinity."""
    return f"{value:.{digits}f}" if np.isfinite(value) else "–"


def value_rows(
    values: Mapping[str, Mapping[str, np.ndarray]], columns: Sequence[str], counts: Mapping[str, int] | None = None
) -> list[list[Cell]]:
    """Return a table row for each name: the name, its count if there are counts, and its metrics with intervals.

    Args:
        values: name -> metric -> (1 + R,) values of the resamples, see `estimate`.
    """
    rows: list[list[Cell]] = []
    for name, metrics in values.items():
        count = [] if counts is None else [counts[name]]
        rows.append([name, *count, *(estimate(metrics[column]) for column in columns)])
    return rows


def intervals_note(noun: str = "images") -> str:
    """Return the note that explains intervals: the bootstrap's samples are what `noun` says."""
    return f"Below each value is its 95 % interval, from a bootstrap over the {noun}."


def overall_section(metrics: Mapping[str, np.ndarray], *warnings: Alert, noun: str = "images") -> Section:
    """Return the section with the metrics over all samples, each with its interval."""
    rows = [[name, estimate(values)] for name, values in metrics.items()]
    return Section("Overall", [*warnings, Table(("", "value"), rows)], intervals_note(noun))


def resample(statistics: SampleStatistics) -> tuple[np.ndarray, Scores]:
    """Return the weights of the resamples, (1 + R, N), and the metrics of each."""
    weights = bootstrap_weights(len(statistics.sample_ids))
    return weights, statistics.scores(weights)


def missing_samples(missing: int, total: int, consequence: str) -> list[Alert]:
    """Return a warning if samples have no prediction, such as "2 of 9 images have no prediction, which …"."""
    if missing == total:
        return [Alert("There is no prediction: everything is missed.")]
    return [Alert(f"{pluralize(missing, 'images', 'have', of=total)} {consequence}")] if missing else []


def rank(values: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """Return the indices of the lowest and of the highest values, without overlap; NaN is ignored."""
    order = [k for k in np.argsort(values, kind="stable").tolist() if values[k] == values[k]]
    count = min(most, len(order) // 2 or len(order))
    return order[:count], [k for k in order[::-1] if k not in order[:count]][:most]


def rank_samples(statistics: SampleStatistics, most: int) -> tuple[np.ndarray, list[tuple[str, list[int]]]]:
    """Return each sample's value, and for the lowest and the highest a title and the samples' indices."""
    metric, values = statistics.sample_scores()
    return values, list(zip((f"lowest {metric}", f"highest {metric}"), rank(values, most)))


def expected_calibration_error(counts: np.ndarray) -> np.ndarray:
    """Return the (R,) mean differences of score and accuracy, each bin weighted by its number of predictions.

    Args:
        counts: (R, 3, bins): number of predictions, sum of their scores, number of correct ones.
    """
    total = counts[:, 0].sum(axis=1)
    error = np.abs(counts[:, 1] - counts[:, 2]).sum(axis=1)
    return np.divide(error, total, out=np.full(len(counts), np.nan), where=total > 0)


def calibration_counts(scores: np.ndarray, samples: np.ndarray, correct: np.ndarray, num_samples: int) -> np.ndarray:
    """Count predictions by score.

    Args:
        scores, samples, correct: (K,) score of each prediction, the number of its sample, and whether it is right.
    Returns:
        (3, bins, N): for each tenth of the score range, number of predictions, sum of scores, number of correct ones.
    """
    counts = np.zeros((3, NUM_BINS, num_samples))
    bins = np.clip((scores * NUM_BINS).astype(int), 0, NUM_BINS - 1)
    for row, values in zip(counts, (1, scores, correct)):
        np.add.at(row, (bins, samples), values)
    return counts


def calibration_section(counts: np.ndarray, weights: np.ndarray, note: str) -> Section:
    """Return the section on the calibration of scores: a reliability diagram and the expected calibration error (Guo et
    al. 2017, https://arxiv.org/abs/1706.04599).

    Args:
        counts: (3, bins, N) for each image: predictions in each bin of the scores, sum of their scores, correct ones.
        weights: (1 + R, N) weights of the resamples.
    """
    sums = np.einsum("kbn,rn->rkb", counts, weights)
    predictions, total, correct = sums.transpose(1, 0, 2)
    if not predictions[0].sum():
        return Section("Calibration", [Alert("There is no prediction.")], note)
    accuracy = np.divide(correct, predictions, out=np.full(correct.shape, np.nan), where=predictions > 0)
    confidence = np.divide(total, predictions, out=np.full(correct.shape, np.nan), where=predictions > 0)[0]
    bins = [estimate(column) for column in accuracy.T]
    low, high = (np.array([getattr(each, end) for each in bins]) for end in ("low", "high"))
    rows: list[list[Cell]] = [
        [f"{k / len(bins):g} to {(k + 1) / len(bins):g}", int(predictions[0, k]), float(confidence[k]), each]
        for k, each in enumerate(bins)
    ]
    title = f"reliability of {pluralize(int(predictions[0].sum()), 'predictions')}"
    parts = [
        Table(("", "ECE"), [["all predictions", estimate(expected_calibration_error(sums))]]),
        Reliability(confidence, accuracy[0], low, high, title, "fraction correct"),
        Details("bins", [Table(("score", "predictions", "mean score", "correct"), rows)]),
    ]
    return Section("Calibration", parts, note)
