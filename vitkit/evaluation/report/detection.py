"""The report of a detector, for boxes or instance masks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitkit.evaluation.bootstrap import bootstrap_weights, estimate
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.detection_statistics import CALIBRATED, THRESHOLDS, DetectionStatistics, f1_score
from vitkit.evaluation.error_breakdown import KINDS, ErrorBreakdown, neighbour_overlaps
from vitkit.evaluation.report.calibration import calibration_section
from vitkit.evaluation.report.charts import Curve, bar_chart, line_chart
from vitkit.evaluation.report.detection_data import interactive_data
from vitkit.evaluation.report.elements import data_block, number, scrolling_table, section, table, value_rows, warning
from vitkit.evaluation.report.pictures import PictureBudget
from vitkit.words import counted

_COLUMNS = ("AP", "AP50", "AP75", "AR")
_CURVES = 10  # number of classes in the precision-recall chart
_NAMES = {"bbox": "boxes", "segm": "masks"}
_CROWDED = ((0.0, 0.1, "alone: IoU with every other below 0.1"), (0.1, 0.3, "0.1 to 0.3"), (0.3, 1.01, "from 0.3"))


def detection_sections(evaluator: CocoEvaluator, pictures: PictureBudget) -> list[str]:
    """Return the report sections for an evaluator after `compute`; details are for masks if they were evaluated."""
    dataset, results, truth = evaluator.dataset, evaluator.results(), evaluator.dataset.ground_truth()
    every = {iou_type: evaluator.statistics(iou_type) for iou_type in evaluator.iou_types}
    statistics = evaluator.statistics()
    weights = bootstrap_weights(len(statistics.sample_ids))
    scores = {iou_type: of_type.scores(weights) for iou_type, of_type in every.items()}
    errors = ErrorBreakdown(statistics, results, truth, list(dataset.category_ids))
    thresholds = ThresholdTable(statistics, weights)
    data = interactive_data(evaluator, results, truth, statistics, thresholds.best, pictures)
    data |= {"curves": thresholds.curves}
    by_class, by_size = evaluator.details()
    class_counts = {name: int(by_class[name]["objects"]) for name in dataset.classes}
    size_counts = {name: int(by_size[name]["objects"]) for name in by_size}
    return [
        section("Overall", *_warnings(evaluator, results), _overall(evaluator, scores), note=_overall_note(evaluator)),
        section(
            "Classes",
            table(
                ("class", "objects", *_COLUMNS),
                value_rows(scores[statistics.iou_type].by_class, _COLUMNS, class_counts),
                caption=f"by class, {_NAMES[statistics.iou_type]}",
            ),
        ),
        section(
            "Object size",
            table(("size", "objects", *_COLUMNS), value_rows(statistics.by_size(weights), _COLUMNS, size_counts)),
            note="Small is below 32 x 32 pixels, large from 96 x 96 on, by the annotated area.",
        ),
        section("Crowding", *_crowding(statistics, errors, truth, thresholds.best, weights), note=_CROWDING),
        section("Precision and recall", _precision_recall(evaluator, statistics, class_counts), note=_PRECISION),
        f"<div class='detection'>{data_block('data', data)}",
        section("Score threshold", _THRESHOLD_CONTROLS, thresholds.chart(), note=_THRESHOLD),
        section("Confusion matrix", _CONFUSION_PART, note=_CONFUSION),
        section("Images", _IMAGES_PART, note=_IMAGES) if data["shown"] else "",
        "</div>",
        section("Errors", *_errors(errors, weights), note=_ERRORS),
        calibration_section(statistics.calibration_counts(), weights, "part that is right", _CALIBRATION),
    ]


_CROWDING = (
    "Images by the number of their objects; and objects by their largest IoU with another object of their image: the "
    "part that is detected at an IoU of 0.5, from the threshold with the highest F1 on."
)
_PRECISION = "Precision at COCO's 101 recalls, each the highest at that recall or above."
_THRESHOLD = (
    "What predictions from a score on give, at an IoU of 0.5. The confusion matrix and the images below follow. Here a "
    "prediction counts for its class alone; in the matrix it may be matched with an object of another class."
)
_CONFUSION = (
    "Rows are true classes, columns predicted ones, at an IoU of 0.5. Choose a cell to see its crops: truth in black "
    "and white, predictions in the colour of their class."
)
_IMAGES = "Images with the lowest and the highest F1 at the threshold with the highest F1 of all."
_ERRORS = (
    "What AP50 would be without the errors of one kind (TIDE, Bolya et al. 2020). Class: right place, wrong class. "
    "Localisation: right class, IoU 0.1 to 0.5. Both: wrong in both. Duplicate: the object has a better prediction. "
    "Background: nothing is there. Missed: an object without any of these. Predictions of all scores count, as for AP."
)
_CALIBRATION = (
    f"How often predictions of a score are right, at an IoU of 0.5; of those from {CALIBRATED} on. The expected "
    "calibration error (ECE) is the mean distance from the diagonal."
)
_THRESHOLD_CONTROLS = """
<div class="controls"><label>score from <input type="range" class="threshold" min="0" max="100" step="1"
 aria-label="score threshold"></label> <output class="chosen"></output>
<label>of <select class="curve" aria-label="class"></select></label>
<button type="button" class="best">highest F1</button></div>
<div class="tiles" aria-live="polite"></div>"""
_CONFUSION_PART = f"""
{scrolling_table("", "confusion")}<div class="frequent"></div>
<dialog><form method="dialog"><h3></h3><button>close</button></form><div class="gallery"></div></dialog>"""
_IMAGES_PART = (
    "<h3>lowest F1</h3><div class='gallery lowest'></div><h3>highest F1</h3><div class='gallery highest'></div>"
)


def _warnings(evaluator: CocoEvaluator, results: Sequence[Any]) -> list[str]:
    count = len(evaluator.dataset.image_ids)
    empty = count - len({result["image_id"] for result in results})
    if not results:
        return [warning("There is no prediction: everything is missed.")]
    if empty:
        return [warning(f"{counted(empty, 'images', 'have', of=count)} no prediction.")]
    return []


def _overall_note(evaluator: CocoEvaluator) -> str:
    limit = evaluator.limit_line()
    return f"COCO's numbers: {limit}. Below each value stands its 95 % interval, by a bootstrap over the images."


def _overall(evaluator: CocoEvaluator, scores: dict[str, Any]) -> str:
    columns = [_NAMES[iou_type] for iou_type in scores]
    rows = []
    for name in evaluator.metric_names:
        values = (of_type.overall[f"{iou_type}/{name}"] for iou_type, of_type in scores.items())
        rows.append([name, *map(estimate, values)])
    return table(("", *columns), rows)


def _crowding(
    statistics: DetectionStatistics,
    errors: ErrorBreakdown,
    truth: dict[str, Any],
    threshold: float,
    weights: np.ndarray,
) -> list[str]:
    *_, num_objects = statistics.threshold_counts()
    groups, counts = {}, {}
    for least, most in count_groups(num_objects):
        chosen = (num_objects >= least) & (num_objects <= most)
        name = f"{least} to {most} objects" if least < most else counted(least, "objects")
        groups[name], counts[name] = statistics.of_images(chosen, weights), int(chosen.sum())
    images = table(("image with", "images", *_COLUMNS), value_rows(groups, _COLUMNS, counts))

    detected = errors.detected_from(threshold)
    overlaps = neighbour_overlaps(truth, errors.objects, statistics)
    rows = []
    for least, most, name in _CROWDED:
        chosen = (overlaps >= least) & (overlaps < most)
        parts = np.zeros((2, len(statistics.sample_ids)))
        np.add.at(parts[0], errors.objects.image[chosen & detected], 1)
        np.add.at(parts[1], errors.objects.image[chosen], 1)
        right, total = parts @ weights.T
        recall = np.divide(right, total, out=np.full(len(weights), np.nan), where=total > 0)
        rows.append([name, int(chosen.sum()), estimate(recall)])
    return [images, table(("objects, by IoU with another", "objects", f"recall from score {threshold:.2f}"), rows)]


def count_groups(num_objects: np.ndarray) -> list[tuple[int, int]]:
    """Divide images into thirds by their number of objects; return the lowest and highest number of each, from 1 on."""
    counts = np.sort(num_objects[num_objects > 0]).astype(int)
    groups: list[tuple[int, int]] = []
    for part in np.array_split(counts, 3):
        least = groups[-1][1] + 1 if groups else 1
        if len(part) and part[-1] >= least:
            groups.append((max(least, int(part[part >= least][0])), int(part[-1])))
    return groups


def _precision_recall(evaluator: CocoEvaluator, statistics: DetectionStatistics, counts: dict[str, int]) -> str:
    precision = statistics.evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class), classes by their ids
    order = [statistics.evaluation.params.catIds.index(raw) for raw in evaluator.dataset.category_ids]
    recalls = np.linspace(0, 1, 101)
    present = [k for k, name in enumerate(evaluator.dataset.classes) if counts[name]]
    of_present = precision[:, :, [order[k] for k in present]]
    if not present:
        return warning("There is no object.")
    means = [Curve(f"IoU {iou:g}", recalls, of_present[k].mean(axis=1)) for k, iou in ((0, 0.5), (5, 0.75), (8, 0.9))]
    most = sorted(present, key=lambda k: -counts[evaluator.dataset.classes[k]])[:_CURVES]
    classes = [Curve(evaluator.dataset.classes[k], recalls, precision[0, :, order[k]]) for k in sorted(most)]
    title = "classes, IoU 0.5" if len(most) == len(present) else f"the {_CURVES} classes with most objects, IoU 0.5"
    charts = line_chart(means, "mean of the classes", "recall", "precision")
    return f"<div class='charts'>{charts}{line_chart(classes, title, 'recall', 'precision')}</div>"


class ThresholdTable:
    """Precision, recall and F1 at 101 thresholds with their intervals, over all classes and for each class."""

    def __init__(self, statistics: DetectionStatistics, weights: np.ndarray):
        self.curves: dict[str, list[Any]] = {"names": [], "values": []}
        chosen: list[tuple[str, list[int] | None]] = [("all classes", None)]
        chosen += [(name, [label]) for label, name in enumerate(statistics.class_names)]
        for name, labels in chosen:
            right, predicted, num_objects = statistics.threshold_counts(labels)
            if not num_objects.sum():
                continue
            values = self._values(weights @ right.T, weights @ predicted.T, (weights @ num_objects)[:, None])
            if not self.curves["names"]:
                self.overall = values
                self.best_index = int(values[0, :, 2].argmax())
                self.best = float(THRESHOLDS[self.best_index])
            counts = np.stack([right.sum(axis=1), predicted.sum(axis=1) - right.sum(axis=1)], axis=1)
            self.curves["names"].append(name)
            self.curves["values"].append(
                [
                    [round(float(x), 3) for metric in row for x in metric] + [int(c) for c in count]
                    for row, count in zip(values.transpose(1, 2, 0), counts)
                ]
            )
            self.curves.setdefault("objects", []).append(int(num_objects.sum()))
        if not self.curves["names"]:
            self.overall, self.best_index, self.best = np.zeros((3, len(THRESHOLDS), 3)), 50, 0.5

    @staticmethod
    def _values(right: np.ndarray, predicted: np.ndarray, num_objects: np.ndarray) -> np.ndarray:
        """Return (3, 101, 3): value, low and high of precision, recall and F1, from (R, 101) counts."""
        precision = np.divide(right, predicted, out=np.ones(right.shape), where=predicted > 0)
        recall = np.divide(right, num_objects, out=np.zeros(right.shape), where=num_objects > 0)
        all_three = np.stack([precision, recall, f1_score(right, predicted, num_objects)], axis=2)  # (R, 101, 3)
        low, high = np.quantile(all_three[1:], [0.025, 0.975], axis=0)
        return np.stack([all_three[0], low, high])

    def chart(self) -> str:
        """Return the chart of the values over the thresholds, with a marker at the best one."""
        value, low, high = self.overall
        curves = [
            Curve(name, THRESHOLDS, value[:, k], low[:, k], high[:, k])
            for k, name in enumerate(("precision", "recall", "F1"))
        ]
        return line_chart(curves, "all classes, with 95 % intervals", "score from", "", marker=self.best)


def _errors(errors: ErrorBreakdown, weights: np.ndarray) -> list[str]:
    fixed, counts = errors.fixed_ap50(weights), errors.counts()
    gains = {kind: estimate(fixed[kind] - fixed["none"]) for kind in KINDS}
    rows = [[kind, counts[kind], estimate(fixed[kind]), gains[kind]] for kind in KINDS]
    bars = bar_chart([(kind, *gains[kind]) for kind in KINDS], "AP50 gained by fixing each kind of error")
    now = number(float(fixed["none"][0]))
    return [bars, table(("error", "number", "AP50 without", "gained"), rows, caption=f"AP50 is {now}")]
