"""The average precision that each kind of error costs (TIDE, Bolya et al. 2020, https://arxiv.org/abs/2008.08115).

Each wrong prediction has one kind of error, determined by its IoU with the objects of its image: the first that
applies, in the order of TIDE's own code.

    localization  0.1 to 0.5 with an object of its class, and not more with another one of its class
    class         at least 0.5 with an object of another class
    duplicate     at least 0.5 with an object of its class that is matched to a better prediction
    background    below 0.1 with every object
    both          0.1 to 0.5 with an object of another class
    missed        (an object) that no prediction detects, nor would if the errors above were corrected
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.report.matching import compute_overlaps
from vitkit.evaluation.bootstrap import mean_of_finite
from vitkit.evaluation.detection_statistics import DetectionStatistics, Ranking, average_precision
from vitkit.evaluation.matching import BACKGROUND

KINDS = ("class", "localization", "both", "duplicate", "background", "missed")


class CountedPredictions(NamedTuple):
    """All P predictions that are scored, class by class, best first."""

    scores: np.ndarray
    labels: np.ndarray
    image: np.ndarray
    """Indices of the predictions' images."""
    correct: np.ndarray
    kind: np.ndarray
    """Index into `KINDS`; -1 for correct predictions."""
    target: np.ndarray
    """Number of the object that each prediction detects, or would detect if its error were corrected; -1: none."""


class CountedObjects(NamedTuple):
    """All M objects that are scored, which are those other than crowds."""

    labels: np.ndarray
    image: np.ndarray
    missed: np.ndarray
    """Whether no prediction detects the object, even with its error corrected."""
    detected: np.ndarray
    number: np.ndarray
    """Index among the annotations."""


class ErrorBreakdown:
    """The kind of every error, and the AP that the model would have without the errors of each kind.

    Args:
        statistics: statistics of the evaluation.
        results: the evaluated predictions in COCO's result format, sorted by image.
        truth: the annotations.
        category_ids: raw category ids in the order of the classes.
    """

    def __init__(
        self,
        statistics: DetectionStatistics,
        results: Sequence[Mapping[str, Any]],
        truth: Mapping[str, Any],
        category_ids: Sequence[int],
    ):
        self.statistics = statistics
        self._label_of = {raw: label for label, raw in enumerate(category_ids)}
        self._num_classes = len(category_ids)
        self.predictions, self.objects = self._classify(results, truth)
        self._is_best = self._find_best()

    def counts(self) -> dict[str, int]:
        """Return the number of errors of each kind."""
        counts = {kind: int((self.predictions.kind == k).sum()) for k, kind in enumerate(KINDS)}
        return counts | {"missed": int(self.objects.missed.sum())}

    def _find_best(self) -> np.ndarray:
        """Return (P,) bool, whether a prediction with a class or localization error would detect its object if it were
        corrected, as no other prediction detects it, nor would a better one with either of these errors."""
        predictions = self.predictions
        rows = np.flatnonzero(np.isin(predictions.kind, [KINDS.index("class"), KINDS.index("localization")]))
        rows = rows[np.argsort(-predictions.scores[rows], kind="stable")]
        _, first = np.unique(predictions.target[rows], return_index=True)
        best = np.zeros(len(predictions.kind), bool)
        best[rows[first]] = ~self.objects.detected[predictions.target[rows[first]]]
        return best

    def find_detected(self, threshold: float) -> np.ndarray:
        """Return (M,) bool, whether each object is detected by a correct prediction with at least this score."""
        detected = np.zeros(len(self.objects.labels), bool)
        detected[self.predictions.target[self.predictions.correct & (self.predictions.scores >= threshold)]] = True
        return detected

    def fixed_ap(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return kind -> (R,) AP at the statistics' IoU without the errors of that kind; "none" -> the actual AP.

        Class and localization errors are made correct if no other prediction detects their object, nor would a better
        one with either of these errors, and else removed; both, duplicate and background errors are removed; missed
        objects no longer have to be detected, and the AP of a class all of whose objects are missed stays 0.
        """
        return {kind: self._average_precision(kind, weights) for kind in ("none", *KINDS)}

    def _average_precision(self, kind: str, weights: np.ndarray) -> np.ndarray:
        predictions, objects = self.predictions, self.objects
        labels, correct = predictions.labels.copy(), predictions.correct.copy()
        kept = np.ones(len(labels), bool)
        if kind in ("both", "duplicate", "background"):
            kept = predictions.kind != KINDS.index(kind)
        elif kind in ("class", "localization"):
            fixed = predictions.kind == KINDS.index(kind)
            detects = fixed & self._is_best
            labels[detects], correct[detects] = objects.labels[predictions.target[detects]], True
            kept = ~fixed | detects
        counted = ~objects.missed if kind == "missed" else np.ones(len(objects.labels), bool)
        num_images = len(self.statistics.sample_ids)
        precisions = []
        for label in range(self._num_classes):
            chosen = np.flatnonzero(kept & (labels == label))
            chosen = chosen[np.argsort(-predictions.scores[chosen], kind="mergesort")]
            of_class = objects.labels == label
            num_objects, num_counted = (
                np.bincount(objects.image[rows], minlength=num_images).astype(np.float64)
                for rows in (of_class, of_class & counted)
            )
            ranking = Ranking(predictions.scores[chosen], predictions.image[chosen], correct[chosen], num_counted)
            # A class that has lost all its objects stays in the mean, which must not rise because it leaves.
            has_lost_all = (weights @ num_objects > 0) & (weights @ num_counted == 0)
            precisions.append(np.where(has_lost_all, 0.0, average_precision(ranking, weights)))
        return mean_of_finite(np.stack(precisions, axis=1))

    def _classify(
        self, results: Sequence[Mapping[str, Any]], truth: Mapping[str, Any]
    ) -> tuple[CountedPredictions, CountedObjects]:
        annotations = truth["annotations"]
        position_of = {image_id: k for k, image_id in enumerate(self.statistics.sample_ids)}
        sizes = {image["id"]: (image.get("height"), image.get("width")) for image in truth["images"]}
        objects_in: dict[int, list[int]] = {}
        for number, annotation in enumerate(annotations):
            if not annotation.get("iscrowd") and annotation["image_id"] in position_of:
                objects_in.setdefault(position_of[annotation["image_id"]], []).append(number)
        # result -> annotation, -1 where it is wrong; ignored results are left out
        owner = dict(self.statistics.matches.owners(self.statistics.iou_index))
        results_in: dict[int, list[int]] = {}
        for number in owner:
            results_in.setdefault(position_of[results[number]["image_id"]], []).append(number)

        taken = {number for number in owner.values() if number >= 0}
        rows, fixable = [], set()
        for position, numbers in sorted(results_in.items()):  # of equal scores, COCO ranks the first image's first
            ours, theirs = [results[k] for k in numbers], objects_in.get(position, [])
            size = sizes[self.statistics.sample_ids[position]]
            overlaps, _ = compute_overlaps(
                ours, [annotations[k] for k in theirs], self.statistics.iou_type, size, self.statistics.sigmas
            )
            true = np.array([self._label_of[annotations[k]["category_id"]] for k in theirs], int)
            for number, result, row in zip(numbers, ours, overlaps):
                label, target, kind = self._label_of[result["category_id"]], owner[number], -1
                if target < 0:
                    kind, best = error_kind(row, true == label, self.statistics.iou)
                    if kind in (KINDS.index("class"), KINDS.index("localization")):
                        target = theirs[best]
                        fixable.add(target)
                rows.append((result["score"], label, position, target, kind))
        rows.sort(key=lambda row: -row[0])
        scores, labels, image, target, kind = np.array(rows, np.float64).reshape(-1, 5).T
        numbers = [number for numbers in objects_in.values() for number in numbers]
        renumbered = {number: k for k, number in enumerate(numbers)}
        target = np.array([renumbered.get(int(k), -1) for k in target], int)
        kind = kind.astype(int)
        predictions = CountedPredictions(scores, labels.astype(int), image.astype(int), kind < 0, kind, target)
        objects = CountedObjects(
            np.array([self._label_of[annotations[k]["category_id"]] for k in numbers], int),
            np.array([position_of[annotations[k]["image_id"]] for k in numbers], int),
            np.array([k not in taken and k not in fixable for k in numbers], bool),
            np.array([k in taken for k in numbers], bool),
            np.array(numbers, int),
        )
        return predictions, objects


def error_kind(overlaps: np.ndarray, same_class: np.ndarray, iou: float = 0.5) -> tuple[int, int]:
    """Return the kind of a wrong prediction's error, and the object that it refers to.

    Args:
        overlaps: (M,) IoU with each object of the prediction's image.
        same_class: (M,) bool, whether the object is of the predicted class.
        iou: minimum IoU of a correct prediction.
    """
    if not len(overlaps) or overlaps.max() < BACKGROUND:
        return KINDS.index("background"), -1
    same, other = (np.where(mask, overlaps, -1.0) for mask in (same_class, ~same_class))
    if BACKGROUND <= same.max() < iou:
        return KINDS.index("localization"), int(same.argmax())
    if other.max() >= iou:
        return KINDS.index("class"), int(other.argmax())
    if same.max() >= iou:
        return KINDS.index("duplicate"), int(same.argmax())
    return KINDS.index("both"), int(other.argmax())


def neighbor_overlaps(truth: Mapping[str, Any], objects: CountedObjects, statistics: DetectionStatistics) -> np.ndarray:
    """Return the largest IoU of each object with another one of its image, of any class, (M,); 0 without others."""
    sizes = {image["id"]: (image.get("height"), image.get("width")) for image in truth["images"]}
    largest = np.zeros(len(objects.labels))
    for position, image_id in enumerate(statistics.sample_ids):
        rows = np.flatnonzero(objects.image == position)
        entries = [truth["annotations"][k] for k in objects.number[rows]]
        overlaps, _ = compute_overlaps(entries, entries, statistics.iou_type, sizes[image_id], statistics.sigmas)
        if len(rows) > 1:
            np.fill_diagonal(overlaps, 0.0)
            largest[rows] = overlaps.max(axis=1)
    return largest
