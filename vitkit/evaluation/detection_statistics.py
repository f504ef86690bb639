"""COCO's metrics of resampled images, computed from a single matching by COCOeval.

COCOeval matches each image by itself, and only then sorts the predictions of all images. So the matches can be kept,
and the average precision of any resample is accumulated from them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pycocotools.cocoeval import COCOeval

from vitkit.evaluation.bootstrap import Scores, Values, mean_of_finite
from vitkit.evaluation.matching import IOUS

RECALLS = np.linspace(0.0, 1.0, 101)
"""The recalls at which COCO averages precision, computed as in pycocotools."""
SIZES = ("small", "medium", "large")
THRESHOLDS = np.round(np.linspace(0.0, 1.0, 101), 2)
"""Scores at which precision, recall and F1 are computed."""
CALIBRATED = 0.05
"""Calibration considers predictions with at least this score; the many below are hardly meant as detections."""
NUM_BINS = 10
_CHUNK = 1 << 22  # number of values that are accumulated at once


class Ranking(NamedTuple):
    """The predictions of a class that count at one IoU, best first."""

    scores: np.ndarray
    """(D,) float64."""
    image: np.ndarray
    """(D,) int64 indices of the predictions' images."""
    correct: np.ndarray
    """(D,) bool, whether each prediction is correct."""
    num_objects: np.ndarray
    """(N,) float64 number of objects to detect in each image."""


def average_precision(ranking: Ranking, weights: np.ndarray) -> np.ndarray:
    """Return (R,) AP at the ranking's IoU, as COCOeval computes it, if images count `weights` (R, N) times.

    NaN where a resample has no object.
    """
    rows = max(1, _CHUNK // max(1, len(ranking.image)))
    if len(weights) > rows:
        chunks = range(0, len(weights), rows)
        return np.concatenate([average_precision(ranking, weights[start : start + rows]) for start in chunks])
    num_objects = weights @ ranking.num_objects
    hits = np.flatnonzero(ranking.correct)
    precision_sum = np.zeros(len(weights))
    if len(hits):
        counted = weights[:, ranking.image[: hits[-1] + 1]]  # predictions after the last correct one change nothing
        num_correct, num_predicted = counted[:, hits].cumsum(axis=1), counted.cumsum(axis=1)[:, hits]
        precision = num_correct / (num_predicted + np.spacing(1))
        envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        recall = num_correct / np.maximum(num_objects, 1)[:, None]
        # Each of COCO's recalls takes the precision at which it is first reached.
        reached = np.searchsorted(RECALLS, recall, side="right")
        precision_sum = (np.diff(reached, axis=1, prepend=0) * envelope).sum(axis=1)
    return np.where(num_objects > 0, precision_sum / len(RECALLS), np.nan)


class DetectionStatistics:
    """The contribution of each image to COCO's metrics; see `SampleStatistics`.

    Args:
        evaluation: COCOeval after its `evaluate`.
        category_ids: raw category ids in the order of the classes.
        class_names: names of the C classes.
        iou: the IoU of `rankings` and of everything that is computed at a score threshold; one at which the
            evaluation has matched.
    """

    def __init__(
        self, evaluation: COCOeval, category_ids: Sequence[int], class_names: Sequence[str], *, iou: float = 0.5
    ):
        matched = np.asarray(evaluation.params.iouThrs)
        self.iou, self.iou_index = iou, int(abs(matched - iou).argmin())
        self.evaluation = evaluation
        self.iou_type = evaluation.params.iouType
        # COCO's metrics are means over its IoUs; the matches may be at another one as well.
        self.num_matched, self.ious = len(matched), matched[: len(IOUS)]
        self.max_dets = tuple(evaluation.params.maxDets)
        self.class_names = list(class_names)
        self.sample_ids = list(evaluation.params.imgIds)
        order = list(evaluation.params.catIds)
        self._positions = [order.index(raw) for raw in category_ids]
        self._images_of: dict[tuple[int, int], list] = {}
        self._matches_of: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}

    def rankings(self, labels: Sequence[int] | None = None) -> list[Ranking]:
        """Return the predictions of each of these classes, None: of all, at the IoU of these statistics."""
        chosen = range(len(self.class_names)) if labels is None else labels
        return [self.ranking(label, self.iou_index) for label in chosen]

    def ranking(self, label: int, iou: int, size: int = 0) -> Ranking:
        """Return the predictions of a class.

        Args:
            iou: index of an IoU at which the evaluation has matched; COCO's come first.
            size: 0 for objects of all sizes, 1 to 3 for `SIZES`.
        """
        if (label, size) not in self._matches_of:
            self._matches_of[label, size] = self._matches(label, size)
        scores, image, correct, counts, num_objects = self._matches_of[label, size]
        kept = counts[iou]
        return Ranking(scores[kept], image[kept], correct[iou, kept], num_objects)

    def _matches(self, label: int, size: int) -> tuple[np.ndarray, ...]:
        """Return a class's predictions, best first: scores, images, (IoUs, D) correct and counted; objects by image."""
        num_objects = np.zeros(len(self.sample_ids))
        none = np.zeros((self.num_matched, 0), bool)
        scores, image, correct, counts = [np.zeros(0)], [np.zeros(0, np.int64)], [none], [none]
        for position, entry in self.images_of(label, size):
            num_objects[position] = np.count_nonzero(~np.asarray(entry["gtIgnore"], bool))
            scores.append(np.asarray(entry["dtScores"], np.float64))
            image.append(np.full(len(entry["dtScores"]), position))
            correct.append(entry["dtMatches"] > 0)
            counts.append(~entry["dtIgnore"].astype(bool))
        scores, image = np.concatenate(scores), np.concatenate(image)
        order = np.argsort(-scores, kind="mergesort")
        correct, counts = (np.concatenate(parts, axis=1)[:, order] for parts in (correct, counts))
        return scores[order], image[order], correct, counts, num_objects

    def images_of(self, label: int, size: int = 0) -> list[tuple[int, dict]]:
        """Return the indices and matches of the images in which a class occurs or is predicted."""
        if (label, size) not in self._images_of:
            count, sizes = len(self.sample_ids), len(self.evaluation.params.areaRng)
            start = (self._positions[label] * sizes + size) * count  # ordered by class, size and image
            entries = enumerate(self.evaluation.evalImgs[start : start + count])
            self._images_of[label, size] = [(k, entry) for k, entry in entries if entry is not None]
        return self._images_of[label, size]

    def average_precisions(self, weights: np.ndarray, size: int = 0) -> np.ndarray:
        """Return (R, C, IoUs) average precisions; NaN where there is no object."""
        result = np.empty((len(weights), len(self.class_names), len(self.ious)))
        for label in range(len(self.class_names)):
            for iou in range(len(self.ious)):
                result[:, label, iou] = average_precision(self.ranking(label, iou, size), weights)
        return result

    def recalls(self, weights: np.ndarray, size: int = 0, max_dets: int | None = None) -> np.ndarray:
        """Return (R, C) recalls, averaged over IoUs, with at most `max_dets` predictions of a class in an image.

        Without it, the predictions that COCOeval has matched count, up to its last limit.
        """
        result = np.full((len(weights), len(self.class_names)), np.nan)
        for label in range(len(self.class_names)):
            detected, num_objects = np.zeros((2, len(self.sample_ids)))
            for position, entry in self.images_of(label, size):
                num_objects[position] = np.count_nonzero(~np.asarray(entry["gtIgnore"], bool))
                matches, ignored = (entry[name][: len(self.ious), :max_dets] for name in ("dtMatches", "dtIgnore"))
                detected[position] = ((matches > 0) & ~ignored.astype(bool)).sum() / len(self.ious)
            total = weights @ num_objects
            np.divide(weights @ detected, total, out=result[:, label], where=total > 0)
        return result

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the twelve COCO metrics, and AP, AP50, AP75 and AR of each class."""
        precision, recall = self.average_precisions(weights), self.recalls(weights)
        overall = _numbers(precision)
        overall |= {f"AP{size[0]}": _numbers(self.average_precisions(weights, k))["AP"] for k, size in _sizes()}
        overall |= {f"AR{n}": mean_of_finite(self.recalls(weights, max_dets=n)) for n in self.max_dets[:-1]}
        overall[f"AR{self.max_dets[-1]}"] = mean_of_finite(recall)
        overall |= {f"AR{size[0]}": mean_of_finite(self.recalls(weights, k)) for k, size in _sizes()}
        by_class = {}
        for label, name in enumerate(self.class_names):
            by_class[name] = {**_numbers(precision[:, label : label + 1]), "AR": recall[:, label]}
        return Scores({f"{self.iou_type}/{name}": values for name, values in overall.items()}, by_class)

    def by_size(self, weights: np.ndarray) -> dict[str, Values]:
        """Return AP, AP50, AP75 and AR of small, medium and large objects."""
        return {
            size: _numbers(self.average_precisions(weights, k)) | {"AR": mean_of_finite(self.recalls(weights, k))}
            for k, size in _sizes()
        }

    def of_images(self, chosen: np.ndarray, weights: np.ndarray) -> Values:
        """Return AP, AP50, AP75 and AR of the images selected by `chosen`, (N,) bool."""
        weights = weights * chosen
        return _numbers(self.average_precisions(weights)) | {"AR": mean_of_finite(self.recalls(weights))}

    def threshold_counts(self, labels: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count the predictions at or above each of `THRESHOLDS`.

        Args:
            labels: the classes to count; None: all classes.
        Returns:
            (101, N) correct predictions, (101, N) all predictions, (N,) objects.
        """
        correct, predicted = np.zeros((2, len(THRESHOLDS), len(self.sample_ids)))
        num_objects = np.zeros(len(self.sample_ids))
        for ranking in self.rankings(labels):
            level = np.searchsorted(THRESHOLDS, ranking.scores, side="right") - 1
            for counts, counted in ((predicted, level >= 0), (correct, (level >= 0) & ranking.correct)):
                np.add.at(counts, (level[counted], ranking.image[counted]), 1)
            num_objects += ranking.num_objects
        return correct[::-1].cumsum(axis=0)[::-1], predicted[::-1].cumsum(axis=0)[::-1], num_objects

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return the F1 of each image at the threshold that maximizes F1 over all images; 1 for an empty image."""
        correct, predicted, num_objects = self.threshold_counts()
        best = int(f1_score(correct.sum(axis=1), predicted.sum(axis=1), num_objects.sum()).argmax())
        return "F1", f1_score(correct[best], predicted[best], num_objects)

    def calibration_counts(self) -> np.ndarray:
        """Count predictions of all classes by score.

        Returns:
            (3, NUM_BINS, N): for each tenth of the score range, number of predictions, sum of scores, number of correct
            ones.
        """
        counts = np.zeros((3, NUM_BINS, len(self.sample_ids)))
        for scores, image, correct, _ in self.rankings():
            meant = scores >= CALIBRATED
            scores, image, correct = scores[meant], image[meant], correct[meant]
            bins = np.minimum((scores * NUM_BINS).astype(int), NUM_BINS - 1)
            for row, values in zip(counts, (1, scores, correct)):
                np.add.at(row, (bins, image), values)
        return counts


def f1_score(correct: np.ndarray, predicted: np.ndarray, num_objects: np.ndarray | float) -> np.ndarray:
    """Return F1; 1 where nothing is predicted and there is nothing to detect."""
    total = np.asarray(predicted + num_objects, np.float64)
    return np.divide(2 * correct, total, out=np.ones(total.shape), where=total > 0)


def _numbers(precision: np.ndarray) -> Values:
    """Average (R, C, IoUs) over classes and IoUs."""
    by_iou = mean_of_finite(precision)  # (R, IoUs)
    return {"AP": by_iou.mean(axis=1), "AP50": by_iou[:, 0], "AP75": by_iou[:, 5]}


def _sizes() -> list[tuple[int, str]]:
    return list(enumerate(SIZES, start=1))
