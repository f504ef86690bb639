"""Evaluates a detector at a single score threshold: precision, recall and F1.

Average precision covers all thresholds at once; a user of a detector has to choose one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitkit.evaluation.detection_statistics import Ranking


class ThresholdRow(NamedTuple):
    """Metrics over all classes of the predictions at or above a score."""

    threshold: float
    precision: float
    """Fraction of predictions that are correct; 1 if there are none."""
    recall: float
    """Fraction of objects that are detected; 0 if there are none."""
    f1: float
    true_positives: int
    false_positives: int
    false_negatives: int


def compute_threshold_rows(rankings: Sequence[Ranking], thresholds: Sequence[float]) -> list[ThresholdRow]:
    """Compute precision, recall and F1 at each threshold, over all predictions of the rankings.

    Args:
        rankings: the predictions of each class, `DetectionStatistics.rankings()`.
        thresholds: scores in 0..1.
    """
    scores, correct, num_objects = _join(rankings)
    return [_row(threshold, scores, correct, num_objects) for threshold in thresholds]


def _join(rankings: Sequence[Ranking]) -> tuple[np.ndarray, np.ndarray, int]:
    scores = np.concatenate([np.zeros(0), *(ranking.scores for ranking in rankings)])
    correct = np.concatenate([np.zeros(0, bool), *(ranking.correct for ranking in rankings)])
    return scores, correct, int(sum(ranking.num_objects.sum() for ranking in rankings))


def _row(threshold: float, scores: np.ndarray, correct: np.ndarray, num_objects: int) -> ThresholdRow:
    kept = scores >= threshold
    true_positives, false_positives = int((correct & kept).sum()), int((~correct & kept).sum())
    precision = true_positives / kept.sum() if kept.any() else 1.0
    recall = true_positives / num_objects if num_objects else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    missed = num_objects - true_positives
    return ThresholdRow(threshold, float(precision), recall, float(f1), true_positives, false_positives, missed)


def find_best_row(rankings: Sequence[Ranking]) -> ThresholdRow:
    """Return the row with the highest F1 among all scores that occur; if no prediction is correct, a row at 1."""
    scores, correct, num_objects = _join(rankings)
    if not correct.any():
        return _row(1.0, scores[:0], correct[:0], num_objects)
    order = np.argsort(-scores, kind="stable")
    num_correct = correct[order].cumsum()
    f1 = 2 * num_correct / (np.arange(1, len(order) + 1) + num_objects)
    # A threshold includes all predictions of the same score or none.
    last_of_score = np.append(scores[order][1:] != scores[order][:-1], True)
    best = np.where(last_of_score, f1, -1).argmax()
    return _row(float(scores[order][best]), scores, correct, num_objects)


def robust_threshold(rankings: Sequence[Ranking]) -> float | None:
    """Return the threshold with the highest F1, halfway to the next lower score; None if no prediction is correct."""
    row = find_best_row(rankings)
    if not row.true_positives:
        return None
    scores = _join(rankings)[0]
    return float((row.threshold + scores[scores < row.threshold].max(initial=0.0)) / 2)
