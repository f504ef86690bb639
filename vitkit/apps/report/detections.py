"""Detections as a part of a page: for each image its objects, its predictions, and which are matched."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np

from vitkit.apps.report.images import LONG_SIDE, ImageBudget
from vitkit.apps.report.matching import AnyClassMatches
from vitkit.apps.report.parts import choose_shown_classes
from vitkit.apps.report.sections import LineChart
from vitkit.evaluation.coco import image_sides
from vitkit.io.segmentations import decode_segmentation

_MAX_PREDICTIONS = 120_000  # over all images: lower scores are left out of the page
_MIN_DRAWN = 0.05  # minimum score of a mask that is drawn


class DetectedImage(NamedTuple):
    """An image with its objects and predictions."""

    index: int
    """Index into the dataset."""
    matches: AnyClassMatches
    true: np.ndarray
    """(M,) int labels of the objects."""
    predicted: np.ndarray
    """(N,) int labels of the predictions."""


class DetectionBrowser(NamedTuple):
    """Metrics and images of the detections above a score threshold, which the page's slider sets."""

    class_names: Sequence[str]
    iou_type: str
    iou: float
    best: float
    """The threshold with the highest F1."""
    curves: Mapping[str, list[Any]]
    """`ThresholdTable.curves`."""
    chart: LineChart
    matrix: np.ndarray
    """(C + 1, C + 1) confusion matrix at the best threshold, see `confusion_matrix`."""
    images: Sequence[DetectedImage]
    lowest: Sequence[int]
    """Indices of the images with the lowest F1,"""
    highest: Sequence[int]
    """and of those with the highest."""
    order: Sequence[int]
    """Indices of all images, those with the most and the rarest confusions first."""
    skeleton: Sequence[tuple[int, int]] = ()
    """The limbs of keypoints, if the page is about these."""


def collect_detections(detections: DetectionBrowser, images: ImageBudget) -> dict[str, Any]:
    """Return the data for the page's script.

    Each image has `labels` and `crowd` of its objects, and `predicted` labels, `scores` and `matched` objects of its
    predictions, -1 for none. Images that the page shows also have boxes, and masks.
    """
    min_score = _min_score(detections.images)
    kept_of = [
        [k for k, result in enumerate(image.matches.predictions) if result["score"] >= min_score]
        for image in detections.images
    ]
    # No prediction affects the matches of better ones, so those that are left keep theirs.
    entries = [_entry(image, kept) for image, kept in zip(detections.images, kept_of)]
    order = [*detections.lowest, *detections.highest, *detections.order]
    urls = images.embed_stored(detections.images[k].index for k in order)
    for image, kept, entry in zip(detections.images, kept_of, entries):
        if url := urls.get(image.index):
            entry |= _shapes(image, kept, detections) | {"url": url}
    return {
        "classes": list(detections.class_names),
        "in_matrix": choose_shown_classes(detections.matrix[:-1]),
        "curves": detections.curves,
        "best": detections.best,
        "min_score": min_score,
        "images": entries,
        "lowest": [k for k in detections.lowest if "url" in entries[k]],
        "highest": [k for k in detections.highest if "url" in entries[k]],
    }


def _min_score(images: Sequence[DetectedImage]) -> float:
    """Return the minimum score of predictions in the page; 0 for all."""
    scores = np.sort([result["score"] for image in images for result in image.matches.predictions])
    return 0.0 if len(scores) <= _MAX_PREDICTIONS else float(np.ceil(100 * scores[-_MAX_PREDICTIONS]) / 100)


def _entry(image: DetectedImage, kept: Sequence[int]) -> dict[str, Any]:
    matches = image.matches
    return {
        "name": str(matches.image.get("file_name", matches.image["id"])),
        "labels": image.true.tolist(),
        "crowd": np.flatnonzero(matches.crowd).tolist(),
        "predicted": image.predicted[kept].tolist(),
        # Rounded down, so that no score reaches a threshold that it is actually below.
        "scores": [np.floor(1e4 * matches.predictions[k]["score"]) / 1e4 for k in kept],
        "matched": matches.matched[kept].tolist(),
    }


def _shapes(image: DetectedImage, kept: Sequence[int], detections: DetectionBrowser) -> dict[str, Any]:
    """Return the size of an image, and its boxes and outlines of masks, or limbs of keypoints, in its pixels."""
    width, height = image_sides(image.matches.image)
    objects, predictions = image.matches.objects, [image.matches.predictions[k] for k in kept]

    def boxes(entries: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [[round(float(x), 1) for x in entry["bbox"]] for entry in entries]

    shapes: dict[str, Any] = {"size": [width, height], "boxes": boxes(objects), "predicted_boxes": boxes(predictions)}
    if detections.iou_type == "keypoints":
        for name, entries in (("masks", objects), ("predicted_masks", predictions)):
            shapes[name] = [limbs(entry, detections.skeleton, max(width, height) / 100) for entry in entries]
    if detections.iou_type == "segm":
        step = max(1.0, max(width, height) / LONG_SIDE)
        shapes["masks"] = [outlines(a["segmentation"], height, width, step) for a in objects]
        shapes["predicted_masks"] = [
            outlines(p["segmentation"], height, width, step) if p["score"] >= _MIN_DRAWN else [] for p in predictions
        ]
    return shapes


def limbs(entry: Mapping[str, Any], skeleton: Sequence[tuple[int, int]], radius: float) -> list[list[float]]:
    """Return lines x, y, x, y, … in pixels: an entry's box, its limbs, and a small square around each labeled point.

    Args:
        entry: an annotation, or a prediction, whose points count as labeled from a confidence of 0.5.
    """
    x, y, width, height = entry["bbox"]
    lines = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    least = 0.5 if "score" in entry else 1
    points = [p if p[2] >= least else None for p in zip(*[iter(entry["keypoints"])] * 3)]
    lines += [[*points[a][:2], *points[b][:2]] for a, b in skeleton if points[a] and points[b]]
    for px, py, _ in filter(None, points):
        lines.append([px - radius, py, px, py - radius, px + radius, py, px, py + radius])
    return [[round(float(value), 1) for value in line] for line in lines]


def outlines(segmentation: Any, height: int, width: int, step: float) -> list[list[int]]:
    """Return the outer outlines of a mask, each a list x, y, x, y, … in pixels, with details down to `step` pixels."""
    mask = np.ascontiguousarray(decode_segmentation(segmentation, height, width), np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    simple = (cv2.approxPolyDP(contour, step, closed=True) for contour in contours)
    return [contour.reshape(-1).tolist() for contour in simple if len(contour) > 2]
