"""Boxes with class names and scores, drawn on images."""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitkit.structures import Detections, DetectionTarget

_GAP = 12  # pixels between the panels of a sheet


def class_color(label: int) -> tuple[int, int, int]:
    """RGB of a class: neighbours in the class list get hues far apart, and every round of hues another brightness."""
    hue = (0.02 + label * 0.381966) % 1.0
    value = (1.0, 0.75, 0.9)[label // 8 % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return round(red * 255), round(green * 255), round(blue * 255)


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
    canvas = _to_picture(image)
    scale = max(1.0, min_side / min(canvas.size))
    # Whole factors keep the pixels of a small image square.
    if scale > 1:
        scale = math.ceil(scale)
        canvas = canvas.resize((canvas.width * scale, canvas.height * scale), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(canvas)
    side = min(canvas.size)
    line = max(2, round(side / 200))
    font = ImageFont.load_default(max(13, round(side / 28)))

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
        place = _place_text(draw, texts[i], font, boxes[i], canvas.size, taken)
        color = class_color(labels[i])
        bright = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 140
        draw.rectangle(place, fill=color)
        draw.text((place[0] + 3, place[1] + 1), texts[i], fill="black" if bright else "white", font=font, anchor="la")
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
        height, width = np.asarray(_to_picture(image)).shape[:2]
        kept = predictions["scores"] >= score_threshold
        boxes_xyxy, labels, scores = (predictions[name][kept] for name in ("boxes_xyxy", "labels", "scores"))
        predicted = draw_detections(image, boxes_xyxy, labels, class_names, scores)
        centre, size = target["boxes_cxcywh"].cpu().chunk(2, dim=1)
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1)
        boxes_xyxy = corners * torch.tensor([width, height, width, height])
        pairs.append((predicted, draw_detections(image, boxes_xyxy, target["labels"], class_names)))

    across = min(pairs_per_line, len(pairs))
    panel = min(480, max(max(predicted.shape[:2]) for predicted, _ in pairs))
    heading = round(panel / 12)
    lines = [pairs[i : i + across] for i in range(0, len(pairs), across)]
    # Panels are as wide as `panel` at most and keep their image's shape, so a line is as high as its highest.
    pictures = [[[_fit(side, panel) for side in pair] for pair in line] for line in lines]
    heights = [max(side.height for pair in line for side in pair) for line in pictures]
    width = across * (2 * panel + _GAP) + (across - 1) * 3 * _GAP + 2 * _GAP
    sheet = Image.new("RGB", (width, heading + sum(heights) + len(lines) * 2 * _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(round(panel / 20))
    columns = [_GAP + k * (2 * panel + 4 * _GAP) for k in range(across)]
    for left in columns:
        for k, title in enumerate((f"prediction (score from {score_threshold:g})", "ground truth")):
            draw.text((left + k * (panel + _GAP), heading / 2), title, fill="black", font=font, anchor="lm")
    top = heading
    for line, height in zip(pictures, heights):
        for left, pair in zip(columns, line):
            for k, side in enumerate(pair):
                sheet.paste(side, (left + k * (panel + _GAP), top))
        top += height + 2 * _GAP
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, format="PNG")


def _to_picture(image: np.ndarray | Tensor) -> Image.Image:
    if isinstance(image, Tensor):
        image = image.detach().cpu().permute(1, 2, 0).numpy()
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"image: got {image.dtype} of shape {tuple(image.shape)}, expected uint8 of shape (H, W, 3), "
            f"or (3, H, W) for a tensor."
        )
    return Image.fromarray(np.ascontiguousarray(image))


def _fit(image: np.ndarray, panel: int) -> Image.Image:
    picture = Image.fromarray(image)
    picture.thumbnail((panel, panel), Image.Resampling.LANCZOS)
    return picture


def _place_text(
    draw: ImageDraw.ImageDraw,
    text: str,
    font: ImageFont.FreeTypeFont,
    box: Sequence[float],
    canvas_size: tuple[int, int],
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float, float, float]:
    """xyxy of a name tag: above its box, below it, or inside it, wherever it first meets no other tag."""
    _, _, width, _ = draw.textbbox((0, 0), text, font=font)
    _, _, _, height = draw.textbbox((0, 0), "Ag", font=font)  # one height for all names
    width, height = width + 6, height + 4
    x0, y0, _, y1 = box
    left = min(max(0, x0), max(0, canvas_size[0] - width))
    places = [(left, top, left + width, top + height) for top in (y0 - height, y1, y0, y1 - height)]
    inside = [p for p in places if p[1] >= 0 and p[3] <= canvas_size[1]] or [(left, 0, left + width, height)]
    free = [p for p in inside if not any(_overlap(p, other) for other in taken)]
    return (free or inside)[0]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
