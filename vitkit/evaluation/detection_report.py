"""Evaluates a detector at a single score threshold: precision, recall, F1 and the confusion matrix.

Average precision covers all thresholds at once; a user of a detector has to choose one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.data.io.segmentations import encode_segmentation

IouType = Literal["bbox", "segm"]
MATCHED = 0.5
"""Lowest IoU with an object at which a prediction can be correct."""


class ThresholdRow(NamedTuple):
    """Metrics over all classes of the predictions at or above a score."""

    threshold: float
    precision: float
    """Fraction of predictions that are correct; 1 if there are none."""
    recall: float
    """Fraction of objects that are detected; 0 if there are none."""
    f1: float
    right: int
    wrong: int
    missed: int


def threshold_rows(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    thresholds: Sequence[float],
    *,
    iou_type: IouType = "bbox",
    iou: float = MATCHED,
) -> list[ThresholdRow]:
    """Compute precision, recall and F1 at each threshold.

    Within each image and class, predictions are matched in order of decreasing score, each to the unmatched object that
    it overlaps most; those on a crowd are ignored. So which objects are detected at a threshold depends on no
    prediction below it.

    Args:
        truth: annotations in COCO's format, as from `ground_truth()` of a dataset.
        results: predictions in COCO's result format.
        thresholds: scores in 0..1.
        iou_type: whether IoU is computed for boxes or masks.
        iou: lowest IoU of a match.
    """
    scores, right = match_by_class(truth, results, iou_type=iou_type, iou=iou)
    num_objects = sum(not annotation.get("iscrowd") for annotation in truth["annotations"])
    return [_row(threshold, scores, right, num_objects) for threshold in thresholds]


def _row(threshold: float, scores: np.ndarray, right: np.ndarray, num_objects: int) -> ThresholdRow:
    kept = scores >= threshold
    num_right, num_wrong = int((right & kept).sum()), int((~right & kept).sum())
    precision = num_right / (num_right + num_wrong) if num_right + num_wrong else 1.0
    recall = num_right / num_objects if num_objects else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return ThresholdRow(threshold, precision, recall, f1, num_right, num_wrong, num_objects - num_right)


def best_threshold(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, iou_type: IouType = "bbox", iou: float = MATCHED
) -> ThresholdRow:
    """Return the row with the highest F1 among all scores that occur; arguments as in `threshold_rows`."""
    scores, right = match_by_class(truth, results, iou_type=iou_type, iou=iou)
    num_objects = sum(not annotation.get("iscrowd") for annotation in truth["annotations"])
    return best_row(scores, right, num_objects)


def best_row(scores: np.ndarray, right: np.ndarray, num_objects: int) -> ThresholdRow:
    """Return the row with the highest F1 among all scores that occur; if no prediction is correct, a row at 1.

    Args:
        scores: (N,) float, scores of all predictions that count.
        right: (N,) bool, whether each prediction is correct.
        num_objects: number of objects to detect.
    """
    if not right.any():
        return _row(1.0, scores[:0], right[:0], num_objects)
    order = np.argsort(-scores, kind="stable")
    num_right = right[order].cumsum()
    f1 = 2 * num_right / (np.arange(1, len(order) + 1) + num_objects)
    # A threshold includes all predictions of the same score or none.
    last_of_score = np.append(scores[order][1:] != scores[order][:-1], True)
    best = np.where(last_of_score, f1, -1).argmax()
    return _row(float(scores[order][best]), scores, right, num_objects)


def match_by_class(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, iou_type: IouType, iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of all predictions that count, and whether each is correct, (N,) float64 and bool.

    See `threshold_rows`.
    """
    objects, predictions = defaultdict(list), defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"], annotation["category_id"]].append(annotation)
    for result in results:
        predictions[result["image_id"], result["category_id"]].append(result)
    scores: list[float] = []
    right: list[bool] = []
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    for key, unsorted in predictions.items():
        by_score = sorted(unsorted, key=lambda result: -result["score"])
        overlaps, crowd = overlaps_of(by_score, objects.get(key, []), iou_type, sizes[key[0]])
        free = ~crowd
        for result, row in zip(by_score, overlaps):
            candidates = np.where(free, row, -1.0)
            best = int(candidates.argmax()) if len(row) else -1
            if best >= 0 and candidates[best] >= iou:
                free[best] = False
                right.append(True)
            elif (row[crowd] >= iou).any():
                continue
            else:
                right.append(False)
            scores.append(result["score"])
    return np.array(scores, np.float64), np.array(right, bool)


def overlaps_of(
    predictions: Sequence[Mapping[str, Any]],
    objects: Sequence[Mapping[str, Any]],
    iou_type: IouType,
    size: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the IoU of predictions and objects; for a crowd, the fraction of the prediction that lies on it.

    Args:
        size: (height, width) of the image.
    Returns:
        (predictions, objects) float64, and a bool for each object, whether it is a crowd.
    """
    crowd = np.array([bool(annotation.get("iscrowd")) for annotation in objects], bool)
    if not predictions or not objects:
        return np.zeros((len(predictions), len(objects))), crowd
    if iou_type == "bbox":
        ours, theirs = (
            np.array([entry["bbox"] for entry in entries], np.float64) for entries in (predictions, objects)
        )
    else:
        ours, theirs = (
            [encode_segmentation(entry["segmentation"], *size) for entry in entries]
            for entries in (predictions, objects)
        )
    return np.asarray(coco_mask.iou(ours, theirs, crowd.astype(np.uint8))), crowd


def confusion_matrix(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    category_ids: Sequence[int],
    *,
    threshold: float = 0.5,
    iou_type: IouType = "bbox",
    iou: float = MATCHED,
) -> np.ndarray:
    """Count which classes are confused with which; predictions are matched to objects of any class.

    The pair with the largest IoU is matched first. Unmatched predictions that lie on a crowd are not counted.

    Args:
        truth, results, iou_type, iou: see `threshold_rows`.
        category_ids: raw category ids in the order of the classes.
        threshold: predictions with a lower score are not counted.
    Returns:
        (C + 1, C + 1) int64: rows are true classes, columns predicted ones; the last row counts predictions without an
        object, the last column missed objects.
    """
    label_of = {raw: label for label, raw in enumerate(category_ids)}
    background = len(category_ids)
    matrix = np.zeros((background + 1, background + 1), np.int64)
    objects, predictions = defaultdict(list), defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    for result in results:
        if result["score"] >= threshold:
            predictions[result["image_id"]].append(result)
    for image in truth["images"]:
        image_predictions, image_objects = predictions[image["id"]], objects[image["id"]]
        overlaps, crowd = overlaps_of(image_predictions, image_objects, iou_type, (image["height"], image["width"]))
        scores = [result["score"] for result in image_predictions]
        pairs, wrong, missed = match_any_class(overlaps, crowd, scores, iou)
        for i, j in pairs:
            true, predicted = image_objects[j]["category_id"], image_predictions[i]["category_id"]
            matrix[label_of[true], label_of[predicted]] += 1
        for i in wrong:
            matrix[background, label_of[image_predictions[i]["category_id"]]] += 1
        for j in missed:
            matrix[label_of[image_objects[j]["category_id"]], background] += 1
    return matrix


def match_any_class(
    overlaps: np.ndarray, crowd: np.ndarray, scores: Sequence[float], iou: float
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Match the predictions of one image with objects of any class, the pair with the largest IoU first.

    Args:
        overlaps: (N, M) IoU of predictions and objects.
        crowd: (M,) bool, whether each object is a crowd.
        scores: scores of the N predictions; among equal overlaps the higher score comes first.
        iou: lowest IoU of a match.
    Returns:
        pairs of a prediction and an object, predictions without an object, objects without a prediction. Unmatched
        predictions that lie on a crowd are in none of them.
    """
    used, taken, pairs = set(), set(), []
    for i, j in overlapping_pairs(overlaps, crowd, scores, iou):
        if i not in used and j not in taken:
            used.add(i)
            taken.add(j)
            pairs.append((i, j))
    on_crowd = (overlaps[:, crowd] >= iou).any(axis=1)
    wrong = [i for i in range(len(overlaps)) if i not in used and not on_crowd[i]]
    return pairs, wrong, [j for j in np.flatnonzero(~crowd).tolist() if j not in taken]


def overlapping_pairs(
    overlaps: np.ndarray, crowd: np.ndarray, scores: Sequence[float], iou: float
) -> list[tuple[int, int]]:
    """Return the pairs of a prediction and an object that may be matched, in the order of `match_any_class`."""
    rank = np.empty(len(scores), np.int64)
    rank[np.argsort([-score for score in scores], kind="stable")] = np.arange(len(scores))
    candidates = np.argwhere((overlaps >= iou) & ~crowd)
    return sorted(map(tuple, candidates.tolist()), key=lambda pair: (-overlaps[pair], rank[pair[0]], pair[1]))
