"""Matches detections with the objects of their image, by COCOeval's rule (Lin et al. 2014,
https://arxiv.org/abs/1405.0312)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.errors import ConfigError
from vitkit.io.segmentations import encode_segmentation

IouType = Literal["bbox", "segm"]
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


class ImageMatches(NamedTuple):
    """The N predictions of an image, and which of its M objects each is matched with."""

    image: Mapping[str, Any]
    objects: list[Mapping[str, Any]]
    predictions: list[Mapping[str, Any]]
    crowd: np.ndarray
    """(M,) bool, whether each object is a crowd."""
    matched: np.ndarray
    """(N,) int64 index of each prediction's object; -1 for none."""


def match_detections(
    overlaps: np.ndarray,
    scores: Sequence[float],
    crowd: np.ndarray,
    *,
    iou: float = 0.5,
    ignored: np.ndarray | None = None,
) -> np.ndarray:
    """Match the predictions of one image with its objects, as COCOeval does.

    The prediction with the highest score chooses first: the object that it overlaps most among those that are not
    taken, and only if there is none, an ignored one. A crowd is never taken. As no prediction affects those with higher
    scores, the predictions above a threshold have the matches that they would have without the others.

    Args:
        overlaps: (N, M) IoU of predictions and objects; negative for pairs that must not be matched.
        scores: scores of the N predictions; among equal ones the first prediction chooses first.
        crowd: (M,) bool, whether each object is a crowd, which is always ignored.
        iou: minimum IoU of a match.
        ignored: (M,) bool, whether each object does not have to be detected; None: only crowds.
    Returns:
        (N,) int64 index of each prediction's object; -1 for none.
    """
    ignored = crowd if ignored is None else crowd | ignored
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    matched = np.full(len(overlaps), -1)
    matched[order] = match_in_order(overlaps[order], crowd, ignored=ignored[None], ious=[iou])[:, 0, 0]
    return matched


def match_in_order(
    overlaps: np.ndarray, crowd: np.ndarray, *, ignored: np.ndarray, ious: Sequence[float]
) -> np.ndarray:
    """Match the predictions of one image, best first; see `match_detections`.

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


def compute_overlaps(
    predictions: Sequence[Mapping[str, Any]],
    objects: Sequence[Mapping[str, Any]],
    iou_type: IouType,
    size: tuple[int | None, int | None],
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the IoU of predictions and objects; for a crowd, the fraction of the prediction that lies on it.

    Args:
        size: (height, width) of the image, read only for masks.
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


def match_images(
    truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, iou_type: IouType = "bbox", iou: float = 0.5
) -> Iterator[ImageMatches]:
    """Match the predictions of each image with objects of any class.

    Args:
        truth: annotations in COCO's format, as from `ground_truth()` of a dataset.
        results: predictions in COCO's result format.
        iou_type: whether IoU is computed for boxes or masks.
        iou: minimum IoU of a match.
    Yields:
        the matches of each image of `truth`, in its order.
    """
    objects, predictions = defaultdict(list), defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    for result in results:
        predictions[result["image_id"]].append(result)
    for image in truth["images"]:
        ours, theirs = predictions[image["id"]], objects[image["id"]]
        overlaps, crowd = compute_overlaps(ours, theirs, iou_type, (image.get("height"), image.get("width")))
        matched = match_detections(overlaps, [result["score"] for result in ours], crowd, iou=iou)
        yield ImageMatches(image, theirs, ours, crowd, matched)


def confusion_matrix(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    category_ids: Sequence[int],
    *,
    threshold: float = 0.5,
    iou_type: IouType = "bbox",
    iou: float = 0.5,
) -> np.ndarray:
    """Count which classes are confused with which; predictions on a crowd are not counted.

    Args:
        truth, results, iou_type, iou: see `match_images`.
        category_ids: raw category ids in the order of the classes.
        threshold: predictions with a lower score are not counted.
    Returns:
        (C + 1, C + 1) int64: rows are true classes, columns predicted ones; the last row counts predictions without an
        object, the last column missed objects.
    """
    label_of = {raw: label for label, raw in enumerate(category_ids)}
    matrix = np.zeros((len(category_ids) + 1,) * 2, np.int64)
    kept = [result for result in results if result["score"] >= threshold]
    for matches in match_images(truth, kept, iou_type=iou_type, iou=iou):
        true = np.array([label_of[entry["category_id"]] for entry in matches.objects], int)
        predicted = np.array([label_of[entry["category_id"]] for entry in matches.predictions], int)
        np.add.at(matrix, confused_classes(true, predicted, matches.crowd, matches.matched, len(category_ids)), 1)
    return matrix


def confused_classes(
    true: np.ndarray, predicted: np.ndarray, crowd: np.ndarray, matched: np.ndarray, nothing: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the true and the predicted classes of an image's matches, (K,) int64 each.

    Args:
        true, crowd: (M,) labels of the objects, and whether each is a crowd.
        predicted, matched: (N,) labels of the predictions, and the object that each is matched with, -1 for none.
        nothing: label for the object of an unmatched prediction, and for the prediction of a missed object.
    """
    # The last entry is for unmatched predictions, whose index is -1.
    rows, counted = np.r_[true, nothing][matched], ~np.r_[crowd, False][matched]
    missed = ~crowd
    missed[matched[matched >= 0]] = False
    return np.r_[rows[counted], true[missed]], np.r_[predicted[counted], np.full(missed.sum(), nothing)]
