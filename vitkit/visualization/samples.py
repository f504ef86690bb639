"""Samples as a dataset returns them: the transformed image with its boxes, masks, class or caption."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitkit.structures import Sample
from vitkit.visualization.boxes import draw_detections
from vitkit.visualization.canvas import class_color, enlargement, to_picture
from vitkit.visualization.masks import draw_masks


def draw_sample(
    sample: Sample, class_names: Sequence[str], *, with_boxes: bool = True, min_side: int = 320
) -> np.ndarray:
    """The image of a sample with what its target says of places: boxes with names; or masks with names, and boxes.

    Args:
        sample: of a dataset; its image uint8.
        class_names: of the target's labels.
        with_boxes: also draws the boxes of masks.
        min_side: an image with a shorter side below this is enlarged to it, so that text on it can be read.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    image, target = to_picture(sample["image"]), sample["target"]
    if "boxes_cxcywh" not in target:
        return np.asarray(_enlarged(image, enlargement(image.size, min_side)))
    boxes_xyxy, labels = corners(target["boxes_cxcywh"], image.size), target["labels"]
    if "masks" not in target:
        return draw_detections(np.asarray(image), boxes_xyxy, labels, class_names, min_side=min_side)
    scale = enlargement(image.size, min_side)
    picture, masks = _enlarged(image, scale), target["masks"].cpu()
    if with_boxes:
        draw = ImageDraw.Draw(picture)
        for box, label in zip((boxes_xyxy * scale).tolist(), labels.tolist()):
            draw.rectangle(box, outline=class_color(label), width=max(1, round(min(picture.size) / 300)))
    masks = masks.repeat_interleave(scale, dim=1).repeat_interleave(scale, dim=2)
    return draw_masks(np.asarray(picture), masks, labels, class_names, min_side=1)


def corners(boxes_cxcywh: Tensor, size: tuple[int, int]) -> Tensor:
    """(N, 4) boxes in 0..1 as xyxy in pixels of an image of that (width, height)."""
    centre, extent = boxes_cxcywh.cpu().chunk(2, dim=1)
    return torch.cat([centre - extent / 2, centre + extent / 2], dim=1) * torch.tensor([*size, *size])


def _enlarged(image: Image.Image, scale: int) -> Image.Image:
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def classes_of(target: Mapping[str, Any], class_names: Sequence[str]) -> Counter[str]:
    """How many objects of each class a target has; of a mixed image its classes in hundredths."""
    if "class_weights" in target:
        weights = (100 * target["class_weights"]).round().int().tolist()
        return Counter({name: weight for name, weight in zip(class_names, weights) if weight})
    if "label" in target:
        return Counter([class_names[target["label"]]])
    return Counter(class_names[label] for label in target.get("labels", torch.zeros(0)).tolist())


def describe(target: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """What is known of an image, in words: "2 cat, dog"; "cat 70 %, dog 30 %"; a caption."""
    if "references" in target:
        return target["references"][0]
    found = classes_of(target, class_names).most_common()
    if "class_weights" in target:
        return ", ".join(f"{name} {share} %" for name, share in found)
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in found) or "no object"
