"""Matches detections with the objects of their image, by COCOeval's rule (Lin et al. 2014,
https://arxiv.org/abs/1405.0312)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vitkit.errors import ConfigError

IouType = Literal["bbox", "segm", "keypoints"]
IOUS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""The IoUs at which COCO counts a detection as correct."""
BACKGROUND = 0.1
"""A prediction that overlaps no object by more than this is an error on the background."""


def check_iou(owner: str, iou: float) -> None:
    """Check the IoU from which a prediction is correct.

    Raises:
        ConfigError: it is not above `BACKGROUND`, or above 1.
    """
    if not BACKGROUND < iou <= 1:
        raise ConfigError(f"{owner}: got iou={iou}; expected more than {BACKGROUND}, up to 1.")


def match_in_order(
    overlaps: np.ndarray, crowd: np.ndarray, *, ignored: np.ndarray, ious: Sequence[float]
) -> np.ndarray:
    """Match the predictions of one image, best first, as COCOeval does.

    A prediction takes the object that it overlaps most among those that are not taken, and only if there is none, an
    ignored one. A crowd is never taken. As no prediction affects those before it, the predictions above a threshold
    have the matches that they would have without the others.

    Args:
        overlaps: (N, M) IoU of predictions and objects; negative for pairs that must not be matched.
        crowd: (M,) bool.
        ignored: (A, M) bool, whether each object does not have to be detected, in each of A ways of counting.
        ious: T minimum IoUs of a match.
    Returns:
        (N, A, T) int64 index of each prediction's object; -1 for none.
    """
    limits = np.minimum(ious, 1 - 1e-10)[:, None]  # pycocotools' margin for rounding
    matched = np.full((len(overlaps), len(ignored), len(limits)), -1)
    free = np.ones((len(ignored), len(limits), len(crowd)), bool)
    ignored = ignored[:, None]
    for i in np.flatnonzero((overlaps >= limits.min()).any(axis=1)).tolist():
        row = overlaps[i]
        possible = free & (row >= limits)
        wanted = possible & ~ignored
        candidates = np.where(wanted.any(axis=-1, keepdims=True), wanted, possible)
        # The last of equal ones, as in pycocotools.
        best = len(row) - 1 - np.where(candidates, row, -1.0)[..., ::-1].argmax(axis=-1)
        matched[i] = np.where(candidates.any(axis=-1), best, -1)
        way, iou = np.nonzero((matched[i] >= 0) & ~crowd[best])
        free[way, iou, best[way, iou]] = False
    return matched
