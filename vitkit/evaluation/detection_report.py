"""What a detector does at one score threshold: precision, recall and F1, and which classes it takes for which.

Average precision is over all thresholds at once; who uses a detector has to choose one.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

IouType = Literal["bbox", "segm"]
MATCHED = 0.5
"""Least IoU of a prediction with the object that it is right about."""


class ThresholdRow(NamedTuple):
    """Predictions from a score on, over all classes."""

    threshold: float
    precision: float
    """Right predictions of all predictions; 1 where there is none."""
    recall: float
    """Objects that were found of all objects; 0 where there is none."""
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
    """Precision, recall and F1 at each threshold.

    In each image and class predictions are matched best score first, each to the free object that it overlaps most;
    those on a crowd count neither way. So which objects are found at a threshold depends on no prediction below it.

    Args:
        truth: in COCO's format, as `ground_truth()` of a dataset.
        results: predictions in COCO's result format.
        thresholds: scores in 0..1.
        iou_type: boxes or masks.
        iou: the least that matches.
    """
    scores, right = match_by_class(truth, results, iou_type=iou_type, iou=iou)
    num_objects = sum(not annotation.get("iscrowd") for annotation in truth["annotations"])
    rows = []
    for threshold in thresholds:
        kept = scores >= threshold
        found, wrong = int((right & kept).sum()), int((~right & kept).sum())
        precision = found / (found + wrong) if found + wrong else 1.0
        recall = found / num_objects if num_objects else 0.0
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        rows.append(ThresholdRow(threshold, precision, recall, f1, found, wrong, num_objects - found))
    return rows


def best_threshold(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    *,
    iou_type: IouType = "bbox",
    iou: float = MATCHED,
) -> ThresholdRow:
    """The row with the highest F1, of all scores that occur; arguments as of `threshold_rows`."""
    scores, right = match_by_class(truth, results, iou_type=iou_type, iou=iou)
    num_objects = sum(not annotation.get("iscrowd") for annotation in truth["annotations"])
    if not len(scores) or not right.any():
        return ThresholdRow(1.0, 1.0, 0.0, 0.0, 0, 0, num_objects)
    order = np.argsort(-scores, kind="stable")
    found = right[order].cumsum()
    f1 = 2 * found / (np.arange(1, len(order) + 1) + num_objects)
    # A threshold takes all predictions of a score or none.
    last_of_score = np.append(scores[order][1:] != scores[order][:-1], True)
    best = int(np.where(last_of_score, f1, -1).argmax())
    precision, recall = found[best] / (best + 1), found[best] / num_objects
    return ThresholdRow(
        float(scores[order][best]), float(precision), float(recall), float(f1[best]),
        int(found[best]), int(best + 1 - found[best]), int(num_objects - found[best]),
    )  # fmt: skip


def match_by_class(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, iou_type: IouType, iou: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of all predictions that count, and whether each is right, (N,) float64 and bool; see `threshold_rows`."""
    objects, predictions = defaultdict(list), defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"], annotation["category_id"]].append(annotation)
    for result in results:
        predictions[result["image_id"], result["category_id"]].append(result)
    scores: list[float] = []
    right: list[bool] = []
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    for key, found in predictions.items():
        found = sorted(found, key=lambda result: -result["score"])
        overlaps, crowd = overlaps_of(found, objects.get(key, []), iou_type, sizes[key[0]])
        free = ~crowd
        for result, row in zip(found, overlaps):
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
    found: Sequence[Mapping[str, Any]],
    objects: Sequence[Mapping[str, Any]],
    iou_type: IouType,
    size: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """IoU of predictions and objects; with a crowd the part of the prediction that lies on it.

    Args:
        size: (height, width) of the image.
    Returns:
        (predictions, objects) float64, and which objects are crowds, bool.
    """
    crowd = np.array([bool(annotation.get("iscrowd")) for annotation in objects], bool)
    if not found or not objects:
        return np.zeros((len(found), len(objects))), crowd
    if iou_type == "bbox":
        ours, theirs = (np.array([entry["bbox"] for entry in entries], np.float64) for entries in (found, objects))
    else:
        ours, theirs = ([run_lengths(e["segmentation"], size) for e in entries] for entries in (found, objects))
    return np.asarray(coco_mask.iou(ours, theirs, crowd.astype(np.uint8))), crowd


def run_lengths(segmentation: Any, size: tuple[int, int]) -> Mapping[str, Any]:
    """Polygons, or run lengths of any kind, as compressed ones."""
    if isinstance(segmentation, list):
        return coco_mask.merge(coco_mask.frPyObjects(segmentation, *size))
    return coco_mask.frPyObjects(segmentation, *size) if isinstance(segmentation["counts"], list) else segmentation


def confusion_matrix(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    category_ids: Sequence[int],
    *,
    threshold: float = 0.5,
    iou_type: IouType = "bbox",
    iou: float = MATCHED,
) -> np.ndarray:
    """Which classes are taken for which: here predictions are matched to objects of any class.

    The pair that overlaps most is matched first. Predictions that are left and lie on a crowd are not counted.

    Args:
        truth, results, iou_type, iou: see `threshold_rows`.
        category_ids: raw ids in the order of the classes.
        threshold: predictions with a lower score are not counted.
    Returns:
        (C + 1, C + 1) int64: rows are true classes, columns predicted ones; the last row holds predictions where
        nothing is, the last column objects that were missed.
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
        found, there = predictions[image["id"]], objects[image["id"]]
        overlaps, crowd = overlaps_of(found, there, iou_type, (image["height"], image["width"]))
        # A stable order of equal overlaps: the prediction with the higher score comes first.
        order = np.argsort([-result["score"] for result in found], kind="stable")
        pairs = [(-overlaps[i, j], rank, i, j) for rank, i in enumerate(order) for j in np.flatnonzero(~crowd)]
        used, taken = set(), set()
        for negative, _, i, j in sorted(pairs):
            if -negative < iou:
                break
            if i not in used and j not in taken:
                used.add(i)
                taken.add(j)
                matrix[label_of[there[j]["category_id"]], label_of[found[i]["category_id"]]] += 1
        for i, result in enumerate(found):
            if i not in used and not (overlaps[i, crowd] >= iou).any():
                matrix[background, label_of[result["category_id"]]] += 1
        for j, annotation in enumerate(there):
            if not crowd[j] and j not in taken:
                matrix[label_of[annotation["category_id"]], background] += 1
    return matrix
