"""Draw predictions of any kind on their images, and beside the ground truth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from vitkit.apps.visualization.boxes import draw_detections, target_boxes_xyxy
from vitkit.apps.visualization.canvas import save_grid, to_pil
from vitkit.apps.visualization.classification import draw_caption, draw_classes
from vitkit.apps.visualization.clips import draw_strip
from vitkit.apps.visualization.keypoints import draw_keypoints
from vitkit.apps.visualization.masks import draw_masks, draw_panoptic, draw_semantic
from vitkit.io.channel_files import as_rgb
from vitkit.protocols.dataset import Dataset
from vitkit.structures import KeypointInfo, ScoreThresholds

_COLUMNS = 4
_MORE_THAN_TRUE = 5
"""How many more predicted than true objects of an image may be drawn."""
_SEMANTIC_OPACITY = 0.8
"""The opacity of semantic maps beside each other, in which two objects of one class are one region."""
_FRAMES = 4  # frames that are drawn of a video
FIELDS = {
    "panoptic": "panoptic",
    "semantic": "semantic",
    "instance": "masks",
    "keypoints": "keypoints",
    "detection": "boxes_xyxy",
    "classification": "class_scores",
    "captioning": "text",
}
"""Task -> the field that holds its predictions. A prediction for several tasks is drawn by the first of them."""


def draw_prediction(
    image: np.ndarray,
    prediction: Mapping[str, Any],
    class_names: Sequence[str],
    field: str,
    *,
    thresholds: ScoreThresholds | None = None,
    best: bool = False,
    keypoints: KeypointInfo | None = None,
) -> np.ndarray:
    """Draw a model's prediction on its image.

    Args:
        image: (H, W, 3) uint8 RGB.
        prediction: what the model's `postprocess` returned, on the CPU, in pixels of the image.
        field: the field to draw, one of `FIELDS`.
        thresholds: objects below the threshold of their class are left out; None: those below 0.5.
        best: whether, if all are left out, the box with the highest score is drawn, dashed.
        keypoints: the limbs and pairs of predicted keypoints; None: only their points are drawn.
    Returns:
        (H', W', 3) uint8 RGB; small images are upscaled, and some fields have a legend below.
    """
    if field == "panoptic":
        return draw_panoptic(image, prediction["panoptic"], prediction["segments_info"], class_names)
    if field == "semantic":
        return draw_semantic(image, prediction["semantic"], class_names)
    if field == "class_scores":
        return draw_classes(image, prediction["class_scores"], class_names)
    if field == "text":
        return draw_caption(image, prediction["text"])
    confident = prediction["scores"] >= (thresholds or ScoreThresholds()).of(prediction["labels"])
    if best and len(confident) and not confident.any() and "boxes_xyxy" in prediction:
        first = prediction["scores"].argmax()[None]
        boxes_xyxy, labels, scores = (prediction[name][first] for name in ("boxes_xyxy", "labels", "scores"))
        return draw_detections(image, boxes_xyxy, labels, class_names, scores, dashed=True)
    if field == "keypoints":
        names = (field, "boxes_xyxy", "labels", "scores")
        points, boxes_xyxy, labels, scores = (prediction[name][confident] for name in names)
        shown = {"boxes_xyxy": boxes_xyxy, "labels": labels, "class_names": class_names, "scores": scores}
        return draw_keypoints(image, points, keypoints, **shown)
    draw = draw_masks if field == "masks" else draw_detections
    objects, labels, scores = (prediction[name][confident] for name in (field, "labels", "scores"))
    return draw(image, objects, labels, class_names, scores)


def draw_truth(
    image: np.ndarray,
    target: Mapping[str, Any],
    class_names: Sequence[str],
    field: str,
    keypoints: KeypointInfo | None = None,
) -> np.ndarray:
    """Draw a target's masks, which cover the image at any resolution, as the field of a prediction is drawn beside it,
    or else its boxes, with keypoints if these are the field."""
    size = to_pil(image).size
    if field == "keypoints" and field in target:
        height, width = target["image_size"]
        points = target["keypoints"].cpu() * torch.tensor([size[0] / width, size[1] / height, 1])
        boxes = target_boxes_xyxy(target, size)
        return draw_keypoints(
            image, points, keypoints, boxes_xyxy=boxes, labels=target["labels"], class_names=class_names
        )
    if "masks" not in target:
        return draw_detections(image, target_boxes_xyxy(target, size), target["labels"], class_names)
    masks = np.zeros((len(target["masks"]), *size[::-1]), bool)
    for resized, mask in zip(masks, target["masks"].cpu().numpy()):
        resized[:] = cv2.resize(mask.view(np.uint8), size, interpolation=cv2.INTER_NEAREST_EXACT)
    opacity = {"opacity": _SEMANTIC_OPACITY} if field == "semantic" else {}
    return draw_masks(image, masks, target["labels"], class_names, shades=field == "panoptic", **opacity)


def draw_predictions(
    samples: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    dataset: Dataset,
    path: str | Path,
    *,
    thresholds: ScoreThresholds | None = None,
) -> bool:
    """Save a PNG of predictions beside their ground truth; for a video, frames are drawn.

    Classes and captions stand below their image, and the true ones above it; classes in green if the best is right.

    Args:
        samples: prediction and target of each image; the targets have `image_id`.
        dataset: the dataset of the images.
        path: the PNG's path; its folder is made.
        thresholds: the score thresholds of the objects that are drawn; None: 0.5.
    Returns:
        whether there is a figure for this kind of prediction.
    """
    field = next((field for field in FIELDS.values() if samples and field in samples[0][0]), None)
    if field is None or not dataset.has_images:
        return False
    index_of = {image_id: index for index, image_id in enumerate(dataset.image_ids)}
    rows = []
    for prediction, target in samples:
        index = index_of[target["image_id"]]
        if dataset.is_video:
            image = draw_strip(dataset.load_frames(index, _FRAMES), per_line=_FRAMES // 2)
        else:
            image = as_rgb(dataset.load_image(index))
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in prediction.items()}
        rows.append((image, on_cpu, target))
    classes = dataset.classes or ()
    if field not in ("text", "class_scores"):
        save_pairs(rows, classes, field, path, thresholds=thresholds, keypoints=dataset.keypoints)
        return True
    images = [draw_prediction(image, row, classes, field) for image, row, _ in rows]
    if field == "text":
        save_grid(images, [f"ground truth: {target['references'][0]}" for _, _, target in rows], path)
    else:
        labels = [target["label"] for _, _, target in rows]
        is_right = [int(row["class_scores"].argmax()) == label for (_, row, _), label in zip(rows, labels)]
        colors = ["green" if right else "firebrick" for right in is_right]
        save_grid(images, [f"ground truth: {classes[label]}" for label in labels], path, colors=colors)
    return True


def save_pairs(
    rows: Sequence[tuple[np.ndarray, Mapping[str, Any], Mapping[str, Any]]],
    class_names: Sequence[str],
    field: str,
    path: str | Path,
    *,
    thresholds: ScoreThresholds | None = None,
    keypoints: KeypointInfo | None = None,
) -> None:
    """Save a PNG with a field of each image's prediction beside its target, two pairs per row; of objects, the best."""
    images, titles = [], []
    for image, prediction, target in rows:
        title = "prediction"
        if field in ("masks", "boxes_xyxy", "keypoints"):
            prediction, title = _best_objects(prediction, field, len(target["labels"]), thresholds or ScoreThresholds())
        if field == "semantic":
            images += [draw_semantic(image, prediction[field], class_names, opacity=_SEMANTIC_OPACITY)]
        else:
            images += [
                draw_prediction(image, prediction, class_names, field, thresholds=thresholds, keypoints=keypoints)
            ]
        images += [draw_truth(image, target, class_names, field, keypoints)]
        titles += [title, "ground truth"]
    save_grid(images, titles, path, per_line=_COLUMNS)


def _best_objects(
    prediction: Mapping[str, Any], field: str, num_true: int, thresholds: ScoreThresholds
) -> tuple[dict[str, Any], str]:
    """Return the objects of a prediction that are drawn, and a title that says which.

    A weak model has its highest F1 at a low threshold, above which many objects lie on each other.
    """
    scores, most = prediction["scores"], num_true + _MORE_THAN_TRUE
    confident = scores >= thresholds.of(prediction["labels"])
    best = scores.where(confident, -1.0).argsort(descending=True, stable=True)[: min(most, int(confident.sum()))]
    title = f"prediction (score from {thresholds.interval})"
    if len(best) < confident.sum():
        title = f"prediction (best {len(best)} of {int(confident.sum())}, from {float(scores[best].min()):.2f})"
    names = {field, "labels", "scores"} | ({"boxes_xyxy"} & prediction.keys())
    return {name: prediction[name][best] for name in names}, title
