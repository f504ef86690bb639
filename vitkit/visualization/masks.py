"""Masks, semantic maps and panoptic maps over images, with class names and a legend."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitkit.structures import DetectionTarget, Instances, PanopticPrediction, SegmentInfo, SemanticPrediction
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

_OPACITY = 0.5
_LEAST_NAMED = 0.002  # smaller parts of the image get no name


def draw_masks(
    image: np.ndarray | Tensor,
    masks: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    class_names: Sequence[str],
    scores: Sequence[float] | np.ndarray | Tensor | None = None,
    *,
    min_side: int = 320,
) -> np.ndarray:
    """Colours masks on a copy of the image, writes their names on them, and lists the classes below.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        masks: (N, H, W) bool; where several lie over each other, the smallest is on top.
        labels: (N,) indices into `class_names`.
        scores: (N,) in 0..1, written behind the names.
        min_side: an image with a shorter side below this is enlarged to it, so that text on it can be read.
    Returns:
        (H', W', 3) uint8 RGB, higher than the image by the legend.
    """
    canvas = to_picture(image)
    masks = torch.as_tensor(masks, dtype=torch.bool).cpu().numpy()
    labels = torch.as_tensor(labels).tolist()
    texts = [class_names[label] for label in labels]
    if scores is not None:
        texts = [f"{text} {score:.2f}" for text, score in zip(texts, torch.as_tensor(scores).tolist())]
    areas = masks.sum(axis=(1, 2))
    order = np.argsort(-areas, kind="stable").tolist()
    scale = enlargement(canvas.size, min_side)
    size = canvas.width * scale, canvas.height * scale
    drawn = np.asarray(canvas.resize(size, Image.Resampling.NEAREST)).copy()
    large = [cv2.resize(mask.view(np.uint8), size, interpolation=cv2.INTER_NEAREST) for mask in masks]

    colors, covered = np.zeros_like(drawn), np.zeros(drawn.shape[:2], bool)
    for k in order:
        inside = large[k] > 0
        colors[inside] = class_color(labels[k])
        covered |= inside
    drawn[covered] = (_OPACITY * colors[covered] + (1 - _OPACITY) * drawn[covered]).astype(np.uint8)
    thickness = max(1, round(min(size) / 300))
    for k in order:
        # The masks' own edges show where neighbours of one class meet.
        contours, _ = cv2.findContours(large[k], cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(drawn, contours, -1, class_color(labels[k]), thickness)
    named = [k for k in order if areas[k] >= _LEAST_NAMED * masks[k].size]
    picture = Image.fromarray(drawn)
    _write_names(picture, [(large[k], texts[k], class_color(labels[k])) for k in named])
    return _with_legend(picture, sorted(set(labels)), class_names)


def draw_semantic(
    image: np.ndarray | Tensor, semantic: np.ndarray | Tensor, class_names: Sequence[str], *, min_side: int = 320
) -> np.ndarray:
    """Colours every pixel by its class; see `draw_masks`.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        semantic: (H, W) indices into `class_names`; others, such as 255, stay uncoloured.
    """
    masks, labels = _masks_of_classes(semantic, len(class_names))
    return draw_masks(image, masks, labels, class_names, min_side=min_side)


def draw_panoptic(
    image: np.ndarray | Tensor,
    panoptic: np.ndarray | Tensor,
    segments_info: Sequence[SegmentInfo],
    class_names: Sequence[str],
    *,
    min_side: int = 320,
) -> np.ndarray:
    """Colours every segment by its class; see `draw_masks`.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        panoptic: (H, W) segment ids; those that are not in `segments_info`, such as 0, stay uncoloured.
        segments_info: label of each, index into `class_names`.
    """
    masks = _masks_of_segments(panoptic, segments_info)
    return draw_masks(image, masks, [segment["label"] for segment in segments_info], class_names, min_side=min_side)


def instance_sheet(
    rows: Sequence[tuple[np.ndarray | Tensor, Instances, DetectionTarget]],
    class_names: Sequence[str],
    path: str | Path,
    *,
    score_threshold: float = 0.5,
    pairs_per_line: int = 2,
) -> None:
    """Saves a PNG with the predicted masks of each image beside the true ones.

    Args:
        rows: (image (H, W, 3) uint8 RGB or (3, H, W) tensor, predictions of its size, target) per image. The target's
            masks cover the image, in any size.
        class_names: of the labels of predictions and targets.
        path: of the PNG; its folder is made.
        score_threshold: predictions below it are not drawn.
        pairs_per_line: images on one line of the sheet.
    Raises:
        ValueError: there are no rows.
    """
    pairs = []
    for image, predictions, target in rows:
        kept = predictions["scores"] >= score_threshold
        masks, labels, scores = (predictions[name][kept] for name in ("masks", "labels", "scores"))
        pairs.append((draw_masks(image, masks, labels, class_names, scores), _draw_truth(image, target, class_names)))
    _save(pairs, f"prediction (score from {score_threshold:g})", path, pairs_per_line)


def semantic_sheet(
    rows: Sequence[tuple[np.ndarray | Tensor, SemanticPrediction, DetectionTarget]],
    class_names: Sequence[str],
    path: str | Path,
    *,
    pairs_per_line: int = 2,
) -> None:
    """Saves a PNG with the predicted classes of each image beside the true ones; arguments as of `instance_sheet`."""
    pairs = [
        (draw_semantic(image, prediction["semantic"], class_names), _draw_truth(image, target, class_names))
        for image, prediction, target in rows
    ]
    _save(pairs, "prediction", path, pairs_per_line)


def panoptic_sheet(
    rows: Sequence[tuple[np.ndarray | Tensor, PanopticPrediction, DetectionTarget]],
    class_names: Sequence[str],
    path: str | Path,
    *,
    pairs_per_line: int = 2,
) -> None:
    """Saves a PNG with the predicted segments of each image beside the true ones; arguments as of `instance_sheet`."""
    pairs = []
    for image, prediction, target in rows:
        predicted = draw_panoptic(image, prediction["panoptic"], prediction["segments_info"], class_names)
        pairs.append((predicted, _draw_truth(image, target, class_names)))
    _save(pairs, "prediction", path, pairs_per_line)


def _save(pairs: list[tuple[np.ndarray, np.ndarray]], title: str, path: str | Path, pairs_per_line: int) -> None:
    if not pairs:
        raise ValueError("rows: got none, expected at least one image to draw.")
    save_pairs(pairs, (title, "ground truth"), path, pairs_per_line=pairs_per_line)


def _draw_truth(image: np.ndarray | Tensor, target: DetectionTarget, class_names: Sequence[str]) -> np.ndarray:
    size = to_picture(image).size
    masks = [
        cv2.resize(mask.view(np.uint8), size, interpolation=cv2.INTER_NEAREST_EXACT).astype(bool)
        for mask in target["masks"].cpu().numpy()
    ]
    masks = np.stack(masks) if masks else np.zeros((0, *size[::-1]), bool)
    return draw_masks(image, masks, target["labels"], class_names)


def _masks_of_classes(semantic: np.ndarray | Tensor, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    semantic = torch.as_tensor(semantic).cpu().numpy()
    labels = np.unique(semantic)
    labels = labels[(labels >= 0) & (labels < num_classes)]
    return semantic[None] == labels[:, None, None], labels


def _masks_of_segments(panoptic: np.ndarray | Tensor, segments_info: Sequence[SegmentInfo]) -> np.ndarray:
    ids = np.array([segment["id"] for segment in segments_info], np.int64)
    return torch.as_tensor(panoptic).cpu().numpy()[None] == ids[:, None, None]


def _write_names(picture: Image.Image, regions: Sequence[tuple[np.ndarray, str, tuple[int, int, int]]]) -> None:
    """Writes each region's name where it is widest, unless another name is there."""
    draw, font = ImageDraw.Draw(picture), font_for(picture)
    taken: list[Any] = []
    for mask, text, color in regions:
        inner = cv2.distanceTransform(
            cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0), cv2.DIST_L2, 3
        )
        row, column = np.unravel_index(inner.argmax(), inner.shape)
        width, height = tag_size(draw, text, font)
        left = min(max(0, column - width / 2), max(0, picture.width - width))
        top = min(max(0, row - height / 2), max(0, picture.height - height))
        place = (left, top, left + width, top + height)
        if not any(overlap(place, other) for other in taken):
            draw_tag(draw, place, text, font, color)
            taken.append(place)


def _with_legend(picture: Image.Image, labels: Sequence[int], class_names: Sequence[str]) -> np.ndarray:
    """The picture above a line, or more, of its classes' colours and names."""
    if not labels:
        return np.asarray(picture)
    font = font_for(picture)
    measure = ImageDraw.Draw(picture)
    places, left, top = [], 4.0, 4.0
    height = tag_size(measure, "", font)[1]
    for label in labels:
        width = tag_size(measure, class_names[label], font)[0] + height + 8
        if left > 4 and left + width > picture.width:
            left, top = 4.0, top + height + 4
        places.append((left, top))
        left += width
    sheet = Image.new("RGB", (picture.width, picture.height + round(top + height + 4)), "white")
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for label, (left, top) in zip(labels, places):
        _draw_entry(draw, (left, top + picture.height), height, class_names[label], class_color(label), font)
    return np.asarray(sheet)


def _draw_entry(
    draw: ImageDraw.ImageDraw,
    place: tuple[float, float],
    height: float,
    name: str,
    color: tuple[int, int, int],
    font: ImageFont.FreeTypeFont,
) -> None:
    left, top = place
    draw.rectangle((left, top + 2, left + height - 4, top + height - 2), fill=color, outline="black")
    draw.text((left + height, top + 1), name, fill="black", font=font, anchor="la")
