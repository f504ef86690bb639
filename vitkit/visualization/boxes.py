"""Boxes with class names and scores, drawn on images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitkit.structures import Detections, DetectionTarget
from vitkit.visualization.canvas import (
    class_color,
    draw_tag,
    enlargement,
    font_for,
    overlap,
    save_pairs,
    tag_size,
    to_picture,
)


def draw_detections(
    image: np.ndarray | Tensor,
    boxes_xyxy: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    class_names: Sequence[str],
    scores: Sequence[float] | np.ndarray | Tensor | None = None,
    *,
    min_side: int = 320,
) -> np.ndarray:
    """Draws boxes and their names on a copy of the image.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        boxes_xyxy: (N, 4) pixels of the image.
        labels: (N,) indices into `class_names`.
        scores: (N,) in 0..1, written behind the names; the highest is drawn last, on top.
        min_side: an image with a shorter side below this is enlarged to it, so that text on it can be read.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    canvas = to_picture(image)
    scale = enlargement(canvas.size, min_side)
    if scale > 1:
        canvas = canvas.resize((canvas.width * scale, canvas.height * scale), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(canvas)
    line = max(2, round(min(canvas.size) / 200))
    font = font_for(canvas)

    labels = torch.as_tensor(labels).tolist()
    texts = [class_names[label] for label in labels]
    order = list(range(len(labels)))
    if scores is not None:
        scores = torch.as_tensor(scores).tolist()
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, scores)]
        order.sort(key=scores.__getitem__)
    boxes = (torch.as_tensor(boxes_xyxy, dtype=torch.float32).reshape(-1, 4) * scale).tolist()
    for i in order:
        draw.rectangle(boxes[i], outline=class_color(labels[i]), width=line)
    # All names after all boxes, the best first: each takes the first free place around its box.
    taken: list[tuple[float, float, float, float]] = []
    for i in reversed(order):
        place = _place_text(tag_size(draw, texts[i], font), boxes[i], canvas.size, taken)
        draw_tag(draw, place, texts[i], font, class_color(labels[i]))
        taken.append(place)
    return np.asarray(canvas)


def prediction_sheet(
    rows: Sequence[tuple[np.ndarray | Tensor, Detections, DetectionTarget]],
    class_names: Sequence[str],
    path: str | Path,
    *,
    score_threshold: float = 0.5,
    pairs_per_line: int = 2,
) -> None:
    """Saves a PNG with the prediction for each image beside its ground truth.

    Args:
        rows: (image as `draw_detections` takes it, predictions in its pixels, target) per image.
        class_names: of the labels of predictions and targets.
        path: of the PNG; its folder is made.
        score_threshold: predictions below it are not drawn.
        pairs_per_line: images on one line of the sheet.
    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows: got none, expected at least one image to draw.")
    pairs = []
    for image, predictions, target in rows:
        height, width = np.asarray(to_picture(image)).shape[:2]
        kept = predictions["scores"] >= score_threshold
        boxes_xyxy, labels, scores = (predictions[name][kept] for name in ("boxes_xyxy", "labels", "scores"))
        predicted = draw_detections(image, boxes_xyxy, labels, class_names, scores)
        centre, size = target["boxes_cxcywh"].cpu().chunk(2, dim=1)
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1)
        boxes_xyxy = corners * torch.tensor([width, height, width, height])
        pairs.append((predicted, draw_detections(image, boxes_xyxy, target["labels"], class_names)))

    titles = (f"prediction (score from {score_threshold:g})", "ground truth")
    save_pairs(pairs, titles, path, pairs_per_line=pairs_per_line)


def _place_text(
    size: tuple[float, float],
    box: Sequence[float],
    canvas_size: tuple[int, int],
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """xyxy of a name tag: above its box, below it, or inside it, wherever it first meets no other tag."""
    width, height = size
    x0, y0, _, y1 = box
    left = min(max(0, x0), max(0, canvas_size[0] - width))
    places = [(left, top, left + width, top + height) for top in (y0 - height, y1, y0, y1 - height)]
    inside = [p for p in places if p[1] >= 0 and p[3] <= canvas_size[1]] or [(left, 0, left + width, height)]
    free = [p for p in inside if not any(overlap(p, other) for other in taken)]
    return (free or inside)[0]
