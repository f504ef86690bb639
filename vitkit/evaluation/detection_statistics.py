"""COCO's metrics of resampled images, computed from a single matching.

Each image is matched by itself, and only then are the predictions of all images sorted. So the average precision of any
resample is accumulated from the same matches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitkit.evaluation.bootstrap import Scores, Values, mean_of_finite
from vitkit.evaluation.detection_matches import RECALLS, ClassMatches, DetectionMatches
from vitkit.evaluation.keypoints import METRICS
from vitkit.evaluation.matching import IOUS

SIZES = ("small", "medium", "large")
_NUMBERED = tuple(enumerate(SIZES, start=1))  # with their indices into AREAS
THRESHOLDS = np.round(np.linspace(0.0, 1.0, 101), 2)
"""Scores at which precision, recall and F1 are computed."""
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
        matches: the matches of all images.
        class_names: names of the C classes.
        iou: the IoU of `rankings` and of everything that is computed at a score threshold; one at which the images were
            matched.
        sigmas: those of keypoints, if the matches are of these.
    """

    def __init__(
        self, matches: DetectionMatches, class_names: Sequence[str], *, iou: float = 0.5, sigmas: Sequence[float] = ()
    ):
        self.matches = matches
        self.iou, self.iou_index = iou, int(abs(np.asarray(matches.ious) - iou).argmin())
        self.iou_type = matches.iou_type
        # COCO's metrics are means over its IoUs; the matches may be at another one as well.
        self.ious = matches.ious[: len(IOUS)]
        self.max_dets = matches.max_dets
        self.sigmas = sigmas
        self.class_names = list(class_names)
        self.sample_ids = matches.image_ids
        self._ranked: dict[tuple[int, int], tuple[ClassMatches, np.ndarray]] = {}

    def rankings(self, labels: Sequence[int] | None = None) -> list[Ranking]:
        """Return the predictions of each of these classes, None: of all, at the IoU of these statistics."""
        chosen = range(len(self.class_names)) if labels is None else labels
        return [self.ranking(label, self.iou_index) for label in chosen]

    def ranking(self, label: int, iou: int, size: int = 0) -> Ranking:
        """Return the predictions of a class.

        Args:
            iou: index of an IoU at which the images were matched; COCO's come first.
            size: 0 for objects of all sizes, 1 to 3 for `SIZES`.
        """
        found, order = self._matches(label, size)
        kept = order[found.counted[iou, order]]
        return Ranking(found.scores[kept], found.image[kept], found.correct[iou, kept], found.num_objects)

    def _matches(self, label: int, size: int) -> tuple[ClassMatches, np.ndarray]:
        """Return the predictions of a class, and their order, best first."""
        if (label, size) not in self._ranked:
            found = self.matches.of_class(label, size)
            self._ranked[label, size] = found, np.argsort(-found.scores, kind="mergesort")
        return self._ranked[label, size]

    def average_precisions(self, weights: np.ndarray, size: int = 0) -> np.ndarray:
        """Return (R, C, IoUs) average precisions; NaN where there is no object."""
        result = np.empty((len(weights), len(self.class_names), len(self.ious)))
        for label in range(len(self.class_names)):
            for iou in range(len(self.ious)):
                result[:, label, iou] = average_precision(self.ranking(label, iou, size), weights)
        return result

    def recalls(
        self, weights: np.ndarray, size: int = 0, max_dets: int | None = None, ious: Sequence[int] | None = None
    ) -> np.ndarray:
        """Return (R, C) recalls, averaged over IoUs, with at most `max_dets` predictions of a class in an image.

        Without it, the predictions that were matched count, up to the last limit. `ious` are indices into `self.ious`.
        """
        result = np.full((len(weights), len(self.class_names)), np.nan)
        for label in range(len(self.class_names)):
            found, _ = self._matches(label, size)
            right = found.correct & found.counted
            right = right[: len(self.ious)][ious or slice(None)].sum(axis=0)
            if max_dets is not None:
                right = right * (found.rank < max_dets)
            detected = np.bincount(found.image, right, len(self.sample_ids)) / len(ious or self.ious)
            total = weights @ found.num_objects
            np.divide(weights @ detected, total, out=result[:, label], where=total > 0)
        return result

    def _keypoint_scores(self, precision: np.ndarray, weights: np.ndarray) -> Values:
        """Return COCO's ten metrics of keypoints."""
        values = _numbers(precision) | {"AR": mean_of_finite(self.recalls(weights))}
        values |= {f"AR{100 * self.ious[k]:.0f}": mean_of_finite(self.recalls(weights, ious=[k])) for k in (0, 5)}
        for k, size in _NUMBERED[1:]:
            values[f"AP{size[0]}"] = _numbers(self.average_precisions(weights, k))["AP"]
            values[f"AR{size[0]}"] = mean_of_finite(self.recalls(weights, k))
        return {name: values[name] for name in METRICS}

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the twelve COCO metrics, ten of keypoints, and AP, AP50, AP75 and AR of each class."""
        precision, recall = self.average_precisions(weights), self.recalls(weights)
        if self.iou_type == "keypoints":
            overall = self._keypoint_scores(precision, weights)
        else:
            overall = _numbers(precision)
            overall |= {f"AP{size[0]}": _numbers(self.average_precisions(weights, k))["AP"] for k, size in _NUMBERED}
            overall |= {f"AR{n}": mean_of_finite(self.recalls(weights, max_dets=n)) for n in self.max_dets[:-1]}
            overall[f"AR{self.max_dets[-1]}"] = mean_of_finite(recall)
            overall |= {f"AR{size[0]}": mean_of_finite(self.recalls(weights, k)) for k, size in _NUMBERED}
        by_class = {}
        for label, name in enumerate(self.class_names):
            by_class[name] = {**_numbers(precision[:, label : label + 1]), "AR": recall[:, label]}
        return Scores({f"{self.iou_type}/{name}": values for name, values in overall.items()}, by_class)

    def by_size(self, weights: np.ndarray) -> dict[str, Values]:
        """Return AP, AP50, AP75 and AR of small, medium and large objects."""
        return {
            size: _numbers(self.average_precisions(weights, k)) | {"AR": mean_of_finite(self.recalls(weights, k))}
            for k, size in _NUMBERED
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


def f1_score(correct: np.ndarray, predicted: np.ndarray, num_objects: np.ndarray | float) -> np.ndarray:
    """Return F1; 1 where nothing is predicted and there is nothing to detect."""
    total = np.asarray(predicted + num_objects, np.float64)
    return np.divide(2 * correct, total, out=np.ones(total.shape), where=total > 0)


def _numbers(precision: np.ndarray) -> Values:
    """Average (R, C, IoUs) over classes and IoUs."""
    by_iou = mean_of_finite(precision)  # (R, IoUs)
    return {"AP": by_iou.mean(axis=1), "AP50": by_iou[:, 0], "AP75": by_iou[:, 5]}
