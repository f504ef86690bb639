"""Draw samples as a dataset returns them: the transformed image with its boxes, masks, class or caption."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import ImageDraw

from vitkit.apps.visualization.boxes import draw_detections, target_boxes_xyxy
from vitkit.apps.visualization.canvas import choose_class_color, enlarge
from vitkit.apps.visualization.clips import draw_strip
from vitkit.apps.visualization.keypoints import draw_keypoints
from vitkit.apps.visualization.masks import draw_masks
from vitkit.structures import KeypointInfo, Sample


def draw_sample(
    sample: Sample,
    class_names: Sequence[str],
    *,
    with_boxes: bool = True,
    keypoints: KeypointInfo | None = None,
    min_side: int = 320,
) -> np.ndarray:
    """Draw the image of a sample with its target's boxes and their names; or with its masks, their names, and boxes.

    For a clip, its frames are drawn; for several views, the frames of the first.

    Args:
        sample: a dataset's sample with a uint8 image.
        class_names: names of the target's labels.
        with_boxes: whether the boxes of masks are also drawn.
        keypoints: the limbs and pairs of the dataset's keypoints.
        min_side: an image with a shorter side below this is upscaled to it, so that text on it is legible.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    target = sample["target"]
    if sample["image"].ndim > 3:
        return draw_strip(sample["image"] if sample["image"].ndim == 4 else sample["image"][0], per_line=4)
    canvas, scale = enlarge(sample["image"], min_side)
    if "boxes_cxcywh" not in target:
        return np.asarray(canvas)
    boxes_xyxy, (labels, class_names) = target_boxes_xyxy(target, canvas.size), _named_labels(target, class_names)
    if "masks" not in target:
        if "keypoints" in target:
            points = target["keypoints"].cpu() * torch.tensor([scale, scale, 1])
            shown = {"boxes_xyxy": boxes_xyxy, "labels": labels, "class_names": class_names}
            return draw_keypoints(np.asarray(canvas), points, keypoints, **shown, min_side=1)
        return draw_detections(np.asarray(canvas), boxes_xyxy, labels, class_names, min_side=1)
    if with_boxes:
        draw = ImageDraw.Draw(canvas)
        for box, label in zip(boxes_xyxy.tolist(), labels.tolist()):
            draw.rectangle(
                box, outline=choose_class_color(label, class_names), width=max(1, round(min(canvas.size) / 300))
            )
    masks = target["masks"].cpu().repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    return draw_masks(np.asarray(canvas), masks, labels, class_names, min_side=1)


def classes_of(target: Mapping[str, Any], class_names: Sequence[str]) -> Counter[str]:
    """Count the objects of each class in a target; for a mixed image, return the weights of its classes in percent."""
    if "class_weights" in target:
        weights = (100 * target["class_weights"]).round().int().tolist()
        return Counter({name: weight for name, weight in zip(class_names, weights) if weight})
    if "label" in target:
        return Counter([class_names[target["label"]]])
    if "labels" not in target:
        return Counter()
    labels, names = _named_labels(target, class_names)
    return Counter(names[label] for label in labels.tolist())


def _named_labels(target: Mapping[str, Any], class_names: Sequence[str]) -> tuple[torch.Tensor, Sequence[str]]:
    """Return the labels of a target and their names: classes, or the parts of a caption that name the objects."""
    if "phrases" not in target:
        return target["labels"], class_names
    texts = [target["phrases"][label] for label in target["labels"].tolist()]
    if "phrase_spans" in target:
        spans = target["phrase_spans"]
        texts = [" ".join(text[begin:end] for begin, end in parts) for text, parts in zip(texts, spans)]
    names = list(dict.fromkeys(texts))
    return torch.tensor([names.index(text) for text in texts], dtype=torch.int64), names


def describe(target: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Describe a target in words: "2 cat, dog"; "cat 70 %, dog 30 %"; a caption."""
    if "references" in target:
        return target["references"][0]
    counts = classes_of(target, class_names).most_common()
    if "class_weights" in target:
        return ", ".join(f"{name} {percent} %" for name, percent in counts)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts) or "no object"
