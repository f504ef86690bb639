"""The data that a detector's page needs to react to the threshold: scores, overlaps, and images with their boxes."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from vitkit.data.io.segmentations import decode_segmentation
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.detection_report import MATCHED, match_any_class, overlapping_pairs, overlaps_of
from vitkit.evaluation.detection_statistics import DetectionStatistics
from vitkit.evaluation.report.matrix import shown_classes
from vitkit.evaluation.report.pictures import LONG_SIDE, PictureBudget

_RANKED = 8  # number of images with the lowest, and with the highest scores
_MOST_PREDICTIONS = 120_000  # over all images: lower scores are left out of the page
_LEAST_DRAWN = 0.05  # lowest score of a mask that is drawn


def interactive_data(
    evaluator: CocoEvaluator,
    results: Sequence[Mapping[str, Any]],
    truth: Mapping[str, Any],
    statistics: DetectionStatistics,
    best: float,
    pictures: PictureBudget,
) -> dict[str, Any]:
    """Return the data for the page's script.

    Each image has `labels` and `crowd` of its objects, `predicted` labels and `scores` of its predictions, the
    predictions that lie on a crowd, and the `pairs` that may match, in order. Images that the page shows also have
    boxes, and masks.

    Args:
        best: the threshold with the highest F1.
    """
    label_of = {raw: label for label, raw in enumerate(evaluator.dataset.category_ids)}
    names = list(evaluator.dataset.classes)
    least = _least_score(results)
    objects, predictions = defaultdict(list), defaultdict(list)
    for annotation in truth["annotations"]:
        objects[annotation["image_id"]].append(annotation)
    for result in results:
        if result["score"] >= least:
            predictions[result["image_id"]].append(result)
    listed = {image["id"]: image for image in truth["images"]}

    images, cells = [], []
    for image_id in statistics.sample_ids:
        image_objects, image_predictions = objects[image_id], predictions[image_id]
        size = (listed[image_id]["height"], listed[image_id]["width"])
        overlaps, crowd = overlaps_of(image_predictions, image_objects, statistics.iou_type, size)
        scores = [result["score"] for result in image_predictions]
        entry = {
            "name": str(listed[image_id].get("file_name", image_id)),
            "labels": [label_of[annotation["category_id"]] for annotation in image_objects],
            "crowd": np.flatnonzero(crowd).tolist(),
            "predicted": [label_of[result["category_id"]] for result in image_predictions],
            # Rounded down, so that no score reaches a threshold that it is actually below.
            "scores": [np.floor(1e4 * score) / 1e4 for score in scores],
            "on_crowd": np.flatnonzero((overlaps[:, crowd] >= MATCHED).any(axis=1)).tolist(),
            "pairs": overlapping_pairs(overlaps, crowd, scores, MATCHED),
        }
        images.append(entry)
        kept = np.array(scores) >= best if scores else np.zeros(0, bool)
        cells.append(_cells(entry, overlaps[kept], crowd, np.flatnonzero(kept), len(names)))

    _, ranks = statistics.sample_scores()
    lowest, highest = ranked_images(ranks, cells)
    total = sum(cells, Counter())
    matrix = np.zeros((len(names) + 1, len(names) + 1), int)
    for cell, count in total.items():
        matrix[cell] = count
    indices = [*lowest, *highest, *_covering(cells, total)]
    shown = pictures.embed_images(indices)
    for index, url in shown.items():
        image_id = statistics.sample_ids[index]
        drawn = _drawn(listed[image_id], objects[image_id], predictions[image_id], statistics.iou_type)
        images[index] |= drawn | {"url": url}
    return {
        "classes": names,
        "in_matrix": shown_classes(matrix[:-1]),
        "best": best,
        "least": least,
        "images": images,
        "shown": len(shown),
        "lowest": [index for index in lowest if index in shown],
        "highest": [index for index in highest if index in shown],
    }


def _least_score(results: Sequence[Mapping[str, Any]]) -> float:
    """Return the lowest score of predictions in the page; 0 for all."""
    if len(results) <= _MOST_PREDICTIONS:
        return 0.0
    scores = np.sort([result["score"] for result in results])
    return float(np.ceil(100 * scores[-_MOST_PREDICTIONS]) / 100)


def _cells(
    entry: Mapping[str, Any], overlaps: np.ndarray, crowd: np.ndarray, kept: np.ndarray, nothing: int
) -> Counter[tuple[int, int]]:
    """Count (true, predicted) classes of an image at the best threshold; `nothing` is the index for no class."""
    predicted, scores = ([entry[key][k] for k in kept] for key in ("predicted", "scores"))
    pairs, wrong, missed = match_any_class(overlaps, crowd, scores, MATCHED)
    cells = Counter((entry["labels"][j], predicted[i]) for i, j in pairs)
    cells.update((nothing, predicted[i]) for i in wrong)
    cells.update((entry["labels"][j], nothing) for j in missed)
    return cells


def ranked_images(scores: np.ndarray, cells: Sequence[Counter]) -> tuple[list[int], list[int]]:
    """Return the images with the lowest and the highest scores; among equals, more errors or objects come first."""
    errors = np.array([sum(count for (t, p), count in each.items() if t != p) for each in cells])
    right = np.array([sum(count for (t, p), count in each.items() if t == p) for each in cells])
    lowest = [k for k in np.lexsort((-errors, scores)).tolist() if errors[k]][:_RANKED]
    highest = [k for k in np.lexsort((-right, -scores)).tolist() if right[k] and k not in lowest][:_RANKED]
    return lowest, highest


def _covering(cells: Sequence[Counter], total: Counter) -> list[int]:
    """Order images by the number of confusions they show, with larger weights for those that are rare in `total`."""
    worth = [sum(count / total[cell] for cell, count in each.items() if cell[0] != cell[1]) for each in cells]
    return np.argsort(-np.array(worth), kind="stable").tolist()


def _drawn(
    image: Mapping[str, Any],
    objects: Sequence[Mapping[str, Any]],
    predictions: Sequence[Mapping[str, Any]],
    iou_type: str,
) -> dict[str, Any]:
    """Return the size of an image, and its boxes and outlines of masks, in its pixels."""
    width, height = image["width"], image["height"]

    def boxes(entries: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        return [[round(float(x), 1) for x in entry["bbox"]] for entry in entries]

    drawn: dict[str, Any] = {"size": [width, height], "boxes": boxes(objects), "predicted_boxes": boxes(predictions)}
    if iou_type == "segm":
        step = max(1.0, max(width, height) / LONG_SIDE)
        drawn["masks"] = [outlines(a["segmentation"], height, width, step) for a in objects]
        drawn["predicted_masks"] = [
            outlines(p["segmentation"], height, width, step) if p["score"] >= _LEAST_DRAWN else [] for p in predictions
        ]
    return drawn


def outlines(segmentation: Any, height: int, width: int, step: float) -> list[list[int]]:
    """Return the outer outlines of a mask, each a list x, y, x, y, … in pixels, with details down to `step` pixels."""
    mask = np.ascontiguousarray(decode_segmentation(segmentation, height, width), np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    simple = (cv2.approxPolyDP(contour, step, closed=True) for contour in contours)
    return [contour.reshape(-1).tolist() for contour in simple if len(contour) > 2]
