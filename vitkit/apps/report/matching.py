"""Matches the predictions of images with objects of any class, and counts which classes are confused."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from vitkit.evaluation.keypoints import compute_oks
from vitkit.evaluation.matching import IouType, match_in_order
from vitkit.io.segmentations import encode_segmentation


class AnyClassMatches(NamedTuple):
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
    """Match the predictions of one image with its objects by the rule of `match_in_order`, the highest score first.

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


def compute_overlaps(
    predictions: Sequence[Mapping[str, Any]],
    objects: Sequence[Mapping[str, Any]],
    iou_type: IouType,
    size: tuple[int | None, int | None],
    sigmas: Sequence[float] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the IoU of predictions and objects; for a crowd, the fraction of the prediction that lies on it.

    Args:
        size: (height, width) of the image, read only for masks.
        sigmas: those of keypoints, whose OKS is computed; both may be objects, of which all points count.
    Returns:
        (predictions, objects) float64, and a bool for each object, whether it is a crowd.
    """
    crowd = np.array([bool(annotation.get("iscrowd")) for annotation in objects], bool)
    if not predictions or not objects:
        return np.zeros((len(predictions), len(objects))), crowd
    if iou_type == "keypoints":
        points = np.array([entry["keypoints"] for entry in predictions], np.float64).reshape(len(predictions), -1, 3)
        return compute_oks(points, objects, sigmas), crowd
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
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    *,
    iou_type: IouType = "bbox",
    iou: float = 0.5,
    sigmas: Sequence[float] = (),
) -> Iterator[AnyClassMatches]:
    """Match the predictions of each image with objects of any class.

    Args:
        truth: annotations in COCO's format, as from `ground_truth()` of a dataset.
        results: predictions in COCO's result format.
        iou_type: whether IoU is computed for boxes or masks.
        iou: minimum IoU of a match.
        sigmas: those of keypoints.
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
        overlaps, crowd = compute_overlaps(ours, theirs, iou_type, (image.get("height"), image.get("width")), sigmas)
        matched = match_detections(overlaps, [result["score"] for result in ours], crowd, iou=iou)
        yield AnyClassMatches(image, theirs, ours, crowd, matched)


def confusion_matrix(
    truth: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    category_ids: Sequence[int],
    *,
    threshold: float = 0.5,
    iou_type: IouType = "bbox",
    iou: float = 0.5,
    sigmas: Sequence[float] = (),
) -> np.ndarray:
    """Count which classes are confused with which; predictions on a crowd are not counted.

    Args:
        truth, results, iou_type, iou, sigmas: see `match_images`.
        category_ids: raw category ids in the order of the classes.
        threshold: predictions with a lower score are not counted.
    Returns:
        (C + 1, C + 1) int64: rows are true classes, columns predicted ones; the last row counts predictions without an
        object, the last column missed objects.
    """
    label_of = {raw: label for label, raw in enumerate(category_ids)}
    matrix = np.zeros((len(category_ids) + 1,) * 2, np.int64)
    kept = [result for result in results if result["score"] >= threshold]
    for matches in match_images(truth, kept, iou_type=iou_type, iou=iou, sigmas=sigmas):
        true = np.array([label_of[entry["category_id"]] for entry in matches.objects], int)
        predicted = np.array([label_of[entry["category_id"]] for entry in matches.predictions], int)
        np.add.at(matrix, list_confused_classes(true, predicted, matches.crowd, matches.matched, len(category_ids)), 1)
    return matrix


def list_confused_classes(
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
