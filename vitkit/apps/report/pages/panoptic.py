"""The page of panoptic maps."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from vitkit.apps.report.intervals import estimate
from vitkit.apps.report.pages.base import prediction_image, report_sections
from vitkit.apps.report.pages.maps import MapPair, confusion_section, error_image, images_section
from vitkit.apps.report.sections import (
    Image,
    PanopticOverlay,
    Section,
    Table,
    intervals_note,
    missing_samples,
    resample,
    value_rows,
)
from vitkit.evaluation.maps import boundary_counts
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.sample_statistics import SemanticStatistics
from vitkit.structures import IGNORE_INDEX, PanopticMap


@report_sections.register
def panoptic_sections(evaluator: PanopticEvaluator) -> list[Section]:
    """Return the sections of the report: quality, classes, confusions of pixels, images with error maps."""
    statistics, pair_of = evaluator.statistics(), partial(panoptic_pair, evaluator)
    weights, scores = resample(statistics)
    total, names = len(statistics.sample_ids), statistics.class_names
    alerts = missing_samples(total - len(evaluator.stored_predictions), total, "no prediction, which counts as missed.")
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
        confusion_section(of_pixels, matrix, pair_of),
        images_section(statistics, pair_of),
    ]


@prediction_image.register
def panoptic_image(evaluator: PanopticEvaluator, index: int) -> Image:
    """Return an image with the pixels of a wrong class in red."""
    return error_image(index, panoptic_pair(evaluator, index), "errors")


def panoptic_pair(evaluator: PanopticEvaluator, index: int) -> MapPair:
    """Return the true and the predicted map of an image of the dataset."""
    dataset = evaluator.dataset
    truth, predicted = dataset.load_panoptic(index), evaluator.read_predicted_map(dataset.image_ids[index])
    overlays = PanopticOverlay(truth, dataset.classes), PanopticOverlay(predicted, dataset.classes)
    return MapPair(label_map(truth), label_map(predicted), overlays)


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
