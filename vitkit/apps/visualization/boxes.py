"""Boxes with class names and scores, drawn on images."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import ImageDraw
from torch import Tensor

from vitkit.apps.visualization.canvas import (
    Labels,
    Scores,
    choose_class_color,
    draw_tag,
    enlarge,
    font_for,
    labels_and_texts,
    overlap,
    tag_size,
)
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.structures import DetectionTarget

_MAX_NAMED = 500
"""The most boxes of an image that are named: each name looks for a position among the others."""


def draw_detections(
    image: np.ndarray | Tensor,
    boxes_xyxy: np.ndarray | Tensor,
    labels: Labels,
    class_names: Sequence[str],
    scores: Scores | None = None,
    *,
    min_side: int = 320,
    dashed: bool = False,
) -> np.ndarray:
    """Draw boxes and their names on a copy of the image.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        boxes_xyxy: (N, 4) pixels of the image.
        labels: (N,) indices into `class_names`.
        scores: (N,) in 0..1, written after the names; the box with the highest score is drawn last, on top.
        min_side: an image with a shorter side below this is upscaled to it, so that text on it is legible.
        dashed: whether the lines are dashed, for boxes that do not count.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    canvas, scale = enlarge(image, min_side)
    draw = ImageDraw.Draw(canvas)
    line = max(2, round(min(canvas.size) / 200))
    font = font_for(canvas)

    labels, texts = labels_and_texts(labels, class_names, scores)
    order = list(range(len(labels)))
    if scores is not None:
        order.sort(key=torch.as_tensor(scores).tolist().__getitem__)
    boxes = torch.as_tensor(boxes_xyxy, dtype=torch.float32).reshape(-1, 4) * scale
    # Pillow takes time and memory in proportion to what is drawn, even outside of the image.
    sides = torch.tensor(canvas.size, dtype=torch.float32).repeat(2)
    boxes = boxes.nan_to_num().minimum(sides + 2 * line).maximum(torch.tensor(-2.0 * line)).tolist()
    for i in order:
        color = choose_class_color(labels[i], class_names)
        if dashed:
            _draw_dashes(draw, boxes[i], color, line)
        else:
            draw.rectangle(boxes[i], outline=color, width=line)
    # Names are drawn after all boxes, the highest score first: each takes the first free position around its box.
    taken: list[tuple[float, float, float, float]] = []
    for i in order[: -_MAX_NAMED - 1 : -1]:
        tag = _tag_box(tag_size(draw, texts[i], font), boxes[i], canvas.size, taken)
        draw_tag(draw, tag, texts[i], font, choose_class_color(labels[i], class_names))
        taken.append(tag)
    return np.asarray(canvas)


def target_boxes_xyxy(target: DetectionTarget, size: tuple[int, int]) -> Tensor:
    """Return a target's boxes, (N, 4) in pixels of an image whose size is (width, height)."""
    return scale_boxes(cxcywh_to_xyxy(target["boxes_cxcywh"].cpu())[None], [size[::-1]])[0]


def _draw_dashes(draw: ImageDraw.ImageDraw, box: Sequence[float], color: tuple[int, int, int], line: int) -> None:
    """Draw the outline of a box (xyxy) in dashes, with gaps that are as long."""
    x0, y0, x1, y1 = box
    dash = 4 * line
    for x in np.arange(x0, x1, 2 * dash).tolist():
        for top in (y0, max(y0, y1 - line)):
            draw.rectangle((x, top, min(x + dash, x1), min(top + line, y1)), fill=color)
    for y in np.arange(y0, y1, 2 * dash).tolist():
        for left in (x0, max(x0, x1 - line)):
            draw.rectangle((left, y, min(left + line, x1), min(y + dash, y1)), fill=color)


def _tag_box(
    size: tuple[float, float],
    box: Sequence[float],
    canvas_size: tuple[int, int],
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """Return the xyxy of a name tag: above, below or inside its box, at the first position without another tag."""
    width, height = size
    x0, y0, _, y1 = box
    left = min(max(0, x0), max(0, canvas_size[0] - width))
    boxes = [(left, top, left + width, top + height) for top in (y0 - height, y1, y0, y1 - height)]
    inside = [p for p in boxes if p[1] >= 0 and p[3] <= canvas_size[1]] or [(left, 0, left + width, height)]
    free = [p for p in inside if not any(overlap(p, other) for other in taken)]
    return (free or inside)[0]
