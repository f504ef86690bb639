"""OKS of keypoints, as pycocotools computes it (https://cocodataset.org/#keypoints-eval), and PCK."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_DETS = 20
"""COCO's limit on the detections of a class in an image, for keypoints."""
METRICS = ("AP", "AP50", "AP75", "APm", "APl", "AR", "AR50", "AR75", "ARm", "ARl")
"""The names of COCO's ten metrics, in the order of COCOeval's statistics."""
PCK_DISTANCE = 0.2
"""PCK counts a point as correct within this fraction of the longer side of its object's box (Yang and Ramanan 2013,
https://www.cs.cmu.edu/~deva/papers/pose_pami.pdf, section 5)."""


def compute_oks(keypoints: np.ndarray, objects: Sequence[Mapping[str, Any]], sigmas: Sequence[float]) -> np.ndarray:
    """Compute the object keypoint similarity of predictions and objects.

    Only an object's labeled points count. One without any is surrounded by its box, twice enlarged: points within it
    have distance 0, so that predictions on a crowd or on an object that was not annotated can be ignored.

    Args:
        keypoints: (D, K, 2 or more) x, y in pixels.
        objects: M annotations in COCO's format.
        sigmas: K values, see `KeypointInfo`.
    Returns:
        (D, M) float64 in 0..1.
    """
    variances = (np.array(sigmas, np.float64) * 2) ** 2
    x, y = np.asarray(keypoints, np.float64)[..., 0], np.asarray(keypoints, np.float64)[..., 1]
    result = np.zeros((len(keypoints), len(objects)))
    for column, annotation in enumerate(objects):
        true_x, true_y, seen = np.array(annotation["keypoints"], np.float64).reshape(-1, 3).T
        labeled = seen > 0
        if labeled.any():
            dx, dy = (x - true_x)[:, labeled], (y - true_y)[:, labeled]
            scale = variances[labeled]
        else:
            left, top, width, height = annotation["bbox"]
            dx = np.maximum(0, left - width - x) + np.maximum(0, x - (left + width * 2))
            dy = np.maximum(0, top - height - y) + np.maximum(0, y - (top + height * 2))
            scale = variances
        errors = (dx**2 + dy**2) / scale / (annotation["area"] + np.spacing(1)) / 2
        result[:, column] = np.exp(-errors).sum(axis=1) / errors.shape[1]
    return result


def boxes_around_points(keypoints: np.ndarray) -> np.ndarray:
    """Return the boxes around (N, K, 2 or more) points, (N, 4) float64 xywh."""
    points = np.asarray(keypoints, np.float64)[..., :2]
    low = points.min(axis=1)
    return np.concatenate([low, points.max(axis=1) - low], axis=1)


def count_correct_points(keypoints: np.ndarray | None, annotation: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return which points of an object are correct by PCK, and which are labeled, (K,) bool each.

    Args:
        keypoints: (K, 2 or more) those of the prediction that is matched with the object; None: there is none.
    """
    true = np.array(annotation["keypoints"], np.float64).reshape(-1, 3)
    labeled = true[:, 2] > 0
    if keypoints is None:
        return np.zeros(len(true), bool), labeled
    distances = np.hypot(*(np.asarray(keypoints, np.float64)[:, :2] - true[:, :2]).T)
    return labeled & (distances <= PCK_DISTANCE * max(annotation["bbox"][2:])), labeled
