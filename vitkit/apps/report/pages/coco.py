"""The page of a detector, of boxes or instance masks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitkit.apps.report.detections import DetectedImage, DetectionBrowser
from vitkit.apps.report.error_breakdown import KINDS, ErrorBreakdown, neighbor_overlaps
from vitkit.apps.report.intervals import bootstrap_weights, estimate
from vitkit.apps.report.matching import list_confused_classes, match_images
from vitkit.apps.report.pages.base import prediction_image, report_sections
from vitkit.apps.report.sections import (
    Alert,
    Bars,
    BoxOverlay,
    Cell,
    Curve,
    Image,
    LineChart,
    Section,
    Table,
    calibration_counts,
    calibration_section,
    intervals_note,
    missing_samples,
    number,
    value_rows,
)
from vitkit.evaluation.coco import TITLES, CocoEvaluator
from vitkit.evaluation.detection_statistics import RECALLS, THRESHOLDS, DetectionStatistics, f1_score
from vitkit.evaluation.matching import IOUS
from vitkit.protocols.dataset import Dataset
from vitkit.text_format import pluralize

_COLUMNS = ("AP", "AP50", "AP75", "AR")
CALIBRATED = 0.05
"""Calibration considers predictions with at least this score; the many below are hardly meant as detections."""
_CURVES = 10  # number of classes in the precision-recall chart
_CROWDED = ((0.0, 0.1, "isolated: IoU with every other below 0.1"), (0.1, 0.3, "0.1 to 0.3"), (0.3, 1.01, "from 0.3"))
_RANKED = 8  # number of images with the lowest, and with the highest scores


@report_sections.register
def detection_sections(evaluator: CocoEvaluator) -> list[Section]:
    """Return the sections of the report; all but the overall metrics are about masks if they were evaluated."""
    dataset, truth, results = evaluator.dataset, evaluator.dataset.ground_truth(), evaluator.select_results()
    statistics_of = evaluator.named_statistics()
    *_, statistics = statistics_of.values()
    classes, sizes = evaluator.details()
    weights = bootstrap_weights(len(statistics.sample_ids))
    scores = {iou_type: of_type.scores(weights) for iou_type, of_type in statistics_of.items()}
    errors = ErrorBreakdown(statistics, results, truth, list(dataset.category_ids))
    thresholds = ThresholdTable(statistics, weights)
    class_counts = {name: int(classes[name]["objects"]) for name in dataset.classes}
    size_counts = {name: int(metrics["objects"]) for name, metrics in sizes.items()}
    overall = Table(
        ("", *(TITLES[iou_type] for iou_type in scores)),
        [
            [name, *(estimate(each.overall[key]) if (key := f"{iou_type}/{name}") in each.overall else ""
                     for iou_type, each in scores.items())]
            for name in dict.fromkeys(name for iou_type in scores for name in evaluator.names_of(iou_type))
        ],
    )  # fmt: skip
    empty = len(dataset.image_ids) - len({result["image_id"] for result in results})
    alerts = missing_samples(empty, len(dataset.image_ids), "no prediction.")
    by_class = value_rows(scores[statistics.iou_type].by_class, _COLUMNS, class_counts)
    by_size = value_rows(statistics.by_size(weights), _COLUMNS, size_counts)
    iou, title = f"{statistics.iou:g}", f"by class, {TITLES[statistics.iou_type]}"
    return [
        Section("Overall", [*alerts, overall], f"COCO's metrics: {evaluator.limit_line()}. {intervals_note()}"),
        Section("Classes", [Table(("class", "objects", *_COLUMNS), by_class, title)]),
        *_keypoint_sections(evaluator),
        Section("Object size", [Table(("size", "objects", *_COLUMNS), by_size)], _SIZES),
        Section("Crowding", _crowding(statistics, errors, truth, thresholds.best, weights), _CROWDING.format(iou)),
        Section("Precision and recall", _precision_recall(dataset, statistics, class_counts), _PRECISION),
        Section("Score threshold", [_detections(dataset, statistics, results, truth, thresholds)]),
        Section("Errors", _errors(errors, weights), _ERRORS.format(ap=_ap_name(statistics), iou=iou)),
        calibration_section(counts_by_score(statistics), weights, _CALIBRATION.format(iou)),
    ]


def _keypoint_sections(evaluator: CocoEvaluator) -> list[Section]:
    """Return the section about each keypoint, if keypoints were evaluated."""
    if "keypoints" not in evaluator.iou_types:
        return []
    rows = [
        [name, str(labeled), f"{correct / labeled:.3f}" if labeled else "–"]
        for name, (correct, labeled) in evaluator.correct_points().items()
    ]
    total = f"{evaluator.metrics['keypoints/PCK']:.3f} of all points."
    return [Section("Keypoints", [Table(("keypoint", "labeled", "PCK"), rows)], _KEYPOINTS + total)]


def counts_by_score(statistics: DetectionStatistics) -> np.ndarray:
    """Return `calibration_counts` of the predictions of all classes."""
    scores, image, correct = map(np.concatenate, [*zip(*statistics.rankings())][:3])
    meant = scores >= CALIBRATED
    return calibration_counts(scores[meant], image[meant], correct[meant], len(statistics.sample_ids))


@prediction_image.register
def detection_image(evaluator: CocoEvaluator, index: int) -> Image:
    """Return an image with the boxes above the threshold with the highest F1."""
    dataset = evaluator.dataset
    answer = evaluator.stored_predictions.get(int(dataset.image_ids[index]))
    if answer is None:
        return Image(index, "no prediction")
    thresholds = evaluator.score_thresholds()
    scores = np.asarray(answer.scores, np.float64)
    kept = scores >= (thresholds.overall if thresholds else 0.5)
    boxes = np.asarray(answer.boxes_xywh, np.float64).reshape(-1, 4)[kept]
    boxes[:, 2:] += boxes[:, :2]
    label_of = {int(raw): label for label, raw in enumerate(dataset.category_ids)}
    labels = np.array([label_of[int(raw)] for raw in answer.category_ids[kept]], int)
    return Image(index, "predictions", BoxOverlay(boxes, labels, scores[kept], dataset.classes))


_KEYPOINTS = (
    "PCK: the fraction of the labeled points within 0.2 times the longer side of their object's box of the prediction "
    "that is matched with the object; points of missed objects count as missed. It is "
)
_SIZES = "Small is below 32 x 32 pixels, large from 96 x 96 pixels, by the annotated area."
_CROWDING = (
    "Images by their number of objects; and objects by their largest IoU with another object of their image: the "
    "fraction that is detected at an IoU of {}, at the threshold with the highest F1."
)
_PRECISION = "Precision at COCO's 101 recalls, each the highest at that recall or above."
_ERRORS = (
    "What {ap} would be without the errors of one kind (TIDE, Bolya et al. 2020). Class: right location, wrong class. "
    "Localization: right class, IoU of 0.1 to {iou}. Both: wrong in both. Duplicate: a better prediction has the "
    "object. Background: there is no object. Missed: an object without any of these. As for AP, predictions of all "
    "scores count."
)
_CALIBRATION = (
    f"How often predictions with a score are correct, at an IoU of {{}}; for scores of at least {CALIBRATED}. The "
    "expected calibration error (ECE) is the mean distance from the diagonal."
)


def _ap_name(statistics: DetectionStatistics) -> str:
    return f"AP{100 * statistics.iou:.0f}"


def _crowding(
    statistics: DetectionStatistics,
    errors: ErrorBreakdown,
    truth: Mapping[str, Any],
    threshold: float,
    weights: np.ndarray,
) -> list[Table]:
    *_, num_objects = statistics.threshold_counts()
    groups, counts = {}, {}
    for least, most in count_groups(num_objects):
        chosen = (num_objects >= least) & (num_objects <= most)
        name = f"{least} to {most} objects" if least < most else pluralize(least, "objects")
        groups[name], counts[name] = statistics.of_images(chosen, weights), int(chosen.sum())
    images = Table(("image with", "images", *_COLUMNS), value_rows(groups, _COLUMNS, counts))

    detected = errors.find_detected(threshold)
    overlaps = neighbor_overlaps(truth, errors.objects, statistics)
    rows: list[list[Cell]] = []
    for least, most, name in _CROWDED:
        chosen = (overlaps >= least) & (overlaps < most)
        parts = np.zeros((2, len(statistics.sample_ids)))
        np.add.at(parts[0], errors.objects.image[chosen & detected], 1)
        np.add.at(parts[1], errors.objects.image[chosen], 1)
        correct, total = parts @ weights.T
        recall = np.divide(correct, total, out=np.full(len(weights), np.nan), where=total > 0)
        rows.append([name, int(chosen.sum()), estimate(recall)])
    return [images, Table(("objects, by IoU with another", "objects", f"recall from score {threshold:.2f}"), rows)]


def count_groups(num_objects: np.ndarray) -> list[tuple[int, int]]:
    """Divide images into thirds by their number of objects; return the lowest and highest number of each, from 1 on."""
    counts = np.sort(num_objects[num_objects > 0]).astype(int)
    groups: list[tuple[int, int]] = []
    for part in np.array_split(counts, 3):
        least = groups[-1][1] + 1 if groups else 1
        if len(part) and part[-1] >= least:
            groups.append((max(least, int(part[part >= least][0])), int(part[-1])))
    return groups


def _precision_recall(
    dataset: Dataset, statistics: DetectionStatistics, counts: Mapping[str, int]
) -> list[LineChart | Alert]:
    precision = statistics.matches.precision_and_recall()[0][..., 0]  # (IoU, recall, class)
    present = [k for k, name in enumerate(dataset.classes) if counts[name]]
    if not present:
        return [Alert("There is no object.")]
    of_present = precision[:, :, present]
    means = [Curve(f"IoU {iou:g}", RECALLS, of_present[IOUS.index(iou)].mean(axis=1)) for iou in (0.5, 0.75, 0.9)]
    most = sorted(present, key=lambda k: -counts[dataset.classes[k]])[:_CURVES]
    at_iou = precision[statistics.iou_index]
    classes = [Curve(dataset.classes[k], RECALLS, at_iou[:, k]) for k in sorted(most)]
    which = "classes" if len(most) == len(present) else f"the {_CURVES} classes with most objects"
    return [
        LineChart(means, "mean of the classes", "recall", "precision"),
        LineChart(classes, f"{which}, IoU {statistics.iou:g}", "recall", "precision"),
    ]


class ThresholdTable:
    """Precision, recall and F1 at 101 thresholds with their intervals, over all classes and for each class."""

    def __init__(self, statistics: DetectionStatistics, weights: np.ndarray):
        self.curves: dict[str, list[Any]] = {"names": [], "values": []}
        chosen: list[tuple[str, list[int] | None]] = [("all classes", None)]
        chosen += [(name, [label]) for label, name in enumerate(statistics.class_names)]
        for name, labels in chosen:
            correct, predicted, num_objects = statistics.threshold_counts(labels)
            if not num_objects.sum():
                continue
            values = self._values(weights @ correct.T, weights @ predicted.T, (weights @ num_objects)[:, None])
            if not self.curves["names"]:
                self.overall = values
                self.best = float(THRESHOLDS[values[0, :, 2].argmax()])
            counts = np.stack([correct.sum(axis=1), predicted.sum(axis=1) - correct.sum(axis=1)], axis=1)
            self.curves["names"].append(name)
            self.curves["values"].append(
                [
                    [round(float(x), 3) for metric in row for x in metric] + [int(c) for c in count]
                    for row, count in zip(values.transpose(1, 2, 0), counts)
                ]
            )
            self.curves.setdefault("objects", []).append(int(num_objects.sum()))
        if not self.curves["names"]:
            self.overall, self.best = np.zeros((3, len(THRESHOLDS), 3)), 0.5

    @staticmethod
    def _values(correct: np.ndarray, predicted: np.ndarray, num_objects: np.ndarray) -> np.ndarray:
        """Return (3, 101, 3): value, low and high of precision, recall and F1, from (R, 101) counts."""
        precision = np.divide(correct, predicted, out=np.ones(correct.shape), where=predicted > 0)
        recall = np.divide(correct, num_objects, out=np.zeros(correct.shape), where=num_objects > 0)
        all_three = np.stack([precision, recall, f1_score(correct, predicted, num_objects)], axis=2)  # (R, 101, 3)
        low, high = np.quantile(all_three[1:], [0.025, 0.975], axis=0)
        return np.stack([all_three[0], low, high])

    def chart(self) -> LineChart:
        """Return the chart of the values over the thresholds, with a marker at the best one."""
        value, low, high = self.overall
        curves = [
            Curve(name, THRESHOLDS, value[:, k], low[:, k], high[:, k])
            for k, name in enumerate(("precision", "recall", "F1"))
        ]
        return LineChart(curves, "all classes, with 95 % intervals", "score from", "", self.best)


def _detections(
    dataset: Dataset,
    statistics: DetectionStatistics,
    results: Sequence[Mapping[str, Any]],
    truth: Mapping[str, Any],
    thresholds: ThresholdTable,
) -> DetectionBrowser:
    label_of = {raw: label for label, raw in enumerate(dataset.category_ids)}
    position_of = {int(image_id): position for position, image_id in enumerate(dataset.image_ids)}
    found = match_images(truth, results, iou_type=statistics.iou_type, iou=statistics.iou, sigmas=statistics.sigmas)
    matches_of = {matches.image["id"]: matches for matches in found}
    images, cells = [], []
    for image_id in statistics.sample_ids:
        matches = matches_of[image_id]
        true, predicted = (
            np.array([label_of[entry["category_id"]] for entry in entries], int)
            for entries in (matches.objects, matches.predictions)
        )
        images.append(DetectedImage(position_of[image_id], matches, true, predicted))
        kept = np.array([result["score"] >= thresholds.best for result in matches.predictions], bool)
        pairs = list_confused_classes(true, predicted[kept], matches.crowd, matches.matched[kept], len(label_of))
        cells.append(Counter(zip(*(classes.tolist() for classes in pairs))))
    matrix = np.zeros((len(label_of) + 1,) * 2, int)
    for of_image in cells:
        for cell, count in of_image.items():
            matrix[cell] += count
    lowest, highest = _rank_images(statistics.sample_scores()[1], cells)
    # Confusions that are rare in the data have larger weights.
    worth = [sum(count / matrix[cell] for cell, count in each.items() if cell[0] != cell[1]) for each in cells]
    return DetectionBrowser(
        class_names=list(dataset.classes),
        iou_type=statistics.iou_type,
        iou=statistics.iou,
        best=thresholds.best,
        curves=thresholds.curves,
        chart=thresholds.chart(),
        matrix=matrix,
        images=images,
        lowest=lowest,
        highest=highest,
        order=np.argsort(-np.array(worth), kind="stable").tolist(),
        skeleton=dataset.keypoints.skeleton if statistics.iou_type == "keypoints" else (),
    )


def _rank_images(scores: np.ndarray, cells: Sequence[Counter[tuple[int, int]]]) -> tuple[list[int], list[int]]:
    """Return the images with the lowest and the highest scores; among equals, more errors or objects come first."""
    errors = np.array([sum(count for (t, p), count in each.items() if t != p) for each in cells])
    correct = np.array([sum(count for (t, p), count in each.items() if t == p) for each in cells])
    lowest = [k for k in np.lexsort((-errors, scores)).tolist() if errors[k]][:_RANKED]
    highest = [k for k in np.lexsort((-correct, -scores)).tolist() if correct[k] and k not in lowest][:_RANKED]
    return lowest, highest


def _errors(errors: ErrorBreakdown, weights: np.ndarray) -> list[Bars | Table]:
    name, counts, fixed = _ap_name(errors.statistics), errors.counts(), errors.fixed_ap(weights)
    gains = {kind: estimate(fixed[kind] - fixed["none"]) for kind in KINDS}
    rows = [[kind, counts[kind], estimate(fixed[kind]), gains[kind]] for kind in KINDS]
    caption = f"{name} is {number(float(fixed['none'][0]))}"
    return [
        Bars([(kind, *gains[kind]) for kind in KINDS], f"{name} gained by fixing each kind of error"),
        Table(("error", "number", f"{name} without", "gained"), rows, caption),
    ]
