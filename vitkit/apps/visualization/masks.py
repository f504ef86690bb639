"""Draw masks, semantic maps and panoptic maps over images, with class names and a legend."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageDraw
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
from vitkit.ops.label_maps import count_values
from vitkit.structures import SegmentInfo

_OPACITY = 0.35
"""The opacity of masks, low enough to see the image below; their edges are drawn in full color."""
_SHADES = ((0.0, 0), (0.6, 255), (0.6, 0), (0.3, 255), (0.3, 0), (0.8, 255), (0.8, 0))
"""Fractions of white (255) or black (0) in the colors of the masks of one class."""
_MIN_NAMED = 0.002  # regions of which less than this fraction of the image is seen get no name


def draw_masks(
    image: np.ndarray | Tensor,
    masks: np.ndarray | Tensor,
    labels: Labels,
    class_names: Sequence[str],
    scores: Scores | None = None,
    *,
    min_side: int = 320,
    shades: bool = False,
    opacity: float = _OPACITY,
) -> np.ndarray:
    """Color masks on a copy of the image, write their names on them, and add a legend of the classes below.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        masks: (N, H, W) bool; where masks overlap, the smallest is on top.
        labels: (N,) indices into `class_names`.
        scores: (N,) in 0..1, written after the names.
        min_side: an image with a shorter side below this is upscaled to it, so that text on it is legible.
        shades: draw the masks of one class in different shades of its color, to tell them from each other: in the order
            of their centers, from left to right, so that right predictions have the shades of the ground truth.
        opacity: that of the masks, in 0..1.
    Returns:
        (H', W', 3) uint8 RGB, with the legend below the image.
    """
    canvas, _ = enlarge(image, min_side)
    drawn, size = np.array(canvas), canvas.size
    labels, texts = labels_and_texts(labels, class_names, scores)
    masks = torch.as_tensor(masks, dtype=torch.bool).cpu().numpy().view(np.uint8)
    areas = [cv2.countNonZero(mask) for mask in masks]
    order = sorted((k for k, area in enumerate(areas) if area), key=lambda k: -areas[k])
    regions = {k: _region(masks[k], size) for k in order}

    # One plus the index of the topmost mask; 0 where there is no mask.
    top = np.zeros(drawn.shape[:2], np.uint16)
    for k in order:
        mask, (x, y) = regions[k]
        np.copyto(top[y : y + mask.shape[0], x : x + mask.shape[1]], k + 1, where=mask.view(bool), casting="unsafe")
    mask_colors = [choose_class_color(label, class_names) for label in labels]
    if shades:
        by_center = sorted(range(len(labels)), key=lambda k: _center(masks[k]))
        mask_colors = [
            _shade(color, [j for j in by_center if labels[j] == label].index(k))
            for k, (color, label) in enumerate(zip(mask_colors, labels))
        ]
    colors = np.array([(0, 0, 0), *mask_colors], np.uint8).take(top, axis=0)
    cv2.copyTo(cv2.addWeighted(colors, opacity, drawn, 1 - opacity, 0), (top > 0).view(np.uint8), drawn)
    thickness = max(1, round(min(size) / 300))
    for k in order:
        # The masks' edges show where objects of one class touch.
        mask, corner = regions[k]
        contours, _ = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE, offset=corner)
        cv2.drawContours(drawn, contours, -1, mask_colors[k], thickness)
    names = []
    for k in order:
        mask, (x, y) = regions[k]
        shown = (top[y : y + mask.shape[0], x : x + mask.shape[1]] == k + 1).view(np.uint8)
        if cv2.countNonZero(shown) >= _MIN_NAMED * top.size:
            names.append((shown, (x, y), texts[k], mask_colors[k]))
    drawing = Image.fromarray(drawn)
    _write_names(drawing, names)
    return _with_legend(drawing, sorted(set(labels)), class_names)


def _shade(color: tuple[int, int, int], number: int) -> tuple[int, int, int]:
    """Return a color itself for number 0, and different mixtures with black or white for the following numbers."""
    fraction, end = _SHADES[number % len(_SHADES)]
    red, green, blue = (round((1 - fraction) * channel + fraction * end) for channel in color)
    return red, green, blue


def _center(mask: np.ndarray) -> tuple[float, float]:
    """Return the (x, y) of a mask's center of mass; that of an empty mask is (0, 0)."""
    moments = cv2.moments(mask, binaryImage=True)
    return moments["m10"] / max(moments["m00"], 1), moments["m01"] / max(moments["m00"], 1)


def _region(mask: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Resize a mask to (width, height); return its crop to the bounding box of its pixels, and the crop's (x, y)."""
    if mask.shape != size[::-1]:
        mask = cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST)
    x, y, width, height = cv2.boundingRect(mask)
    return mask[y : y + height, x : x + width], (x, y)


def draw_semantic(
    image: np.ndarray | Tensor, semantic: np.ndarray | Tensor, class_names: Sequence[str], *, opacity: float = _OPACITY
) -> np.ndarray:
    """Color every pixel by its class; see `draw_masks`.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        semantic: (H, W) indices into `class_names`; other values, such as 255, stay uncolored.
        opacity: that of the colors, in 0..1; 1 shows a region of several objects as one.
    """
    semantic = torch.as_tensor(semantic).cpu().numpy()
    labels, _ = count_values(semantic)
    labels = labels[(labels >= 0) & (labels < len(class_names))]
    return draw_masks(image, semantic[None] == labels[:, None, None], labels, class_names, opacity=opacity)


def draw_panoptic(
    image: np.ndarray | Tensor,
    panoptic: np.ndarray | Tensor,
    segments_info: Sequence[SegmentInfo],
    class_names: Sequence[str],
) -> np.ndarray:
    """Color every segment in a shade of its class's color; see `draw_masks`.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        panoptic: (H, W) segment ids; those that are not in `segments_info`, such as 0, stay uncolored.
        segments_info: the id of each segment, and its label, an index into `class_names`.
    """
    ids = np.array([segment["id"] for segment in segments_info], np.int64)
    masks = torch.as_tensor(panoptic).cpu().numpy()[None] == ids[:, None, None]
    return draw_masks(image, masks, [segment["label"] for segment in segments_info], class_names, shades=True)


def _write_names(
    drawing: Image.Image, regions: Sequence[tuple[np.ndarray, tuple[int, int], str, tuple[int, int, int]]]
) -> None:
    """Write each region's name where what is seen of it is widest, unless another name is already written there."""
    draw, font = ImageDraw.Draw(drawing), font_for(drawing)
    taken: list[Any] = []
    for mask, (x, y), text, color in regions:
        inner = cv2.distanceTransform(
            cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0), cv2.DIST_L2, 3
        )
        row, column = np.unravel_index(inner.argmax(), inner.shape)
        row, column = row + y, column + x
        width, height = tag_size(draw, text, font)
        left = min(max(0, column - width / 2), max(0, drawing.width - width))
        top = min(max(0, row - height / 2), max(0, drawing.height - height))
        tag = (left, top, left + width, top + height)
        if not any(overlap(tag, other) for other in taken):
            draw_tag(draw, tag, text, font, color)
            taken.append(tag)


def _with_legend(drawing: Image.Image, labels: Sequence[int], class_names: Sequence[str]) -> np.ndarray:
    """Add one or more lines with the classes' colors and names below an image."""
    if not labels:
        return np.asarray(drawing)
    font = font_for(drawing)
    measure = ImageDraw.Draw(drawing)
    corners, left, top = [], 4.0, 4.0
    height = tag_size(measure, "", font)[1]
    for label in labels:
        width = tag_size(measure, class_names[label], font)[0] + height + 8
        if left > 4 and left + width > drawing.width:
            left, top = 4.0, top + height + 4
        corners.append((left, top))
        left += width
    width = max(drawing.width, round(max(tag_size(measure, class_names[k], font)[0] for k in labels) + height + 12))
    canvas = Image.new("RGB", (width, drawing.height + round(top + height + 4)), "white")
    canvas.paste(drawing, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for label, (left, top) in zip(labels, corners):
        top += drawing.height
        color_box = (left, top + 2, left + height - 4, top + height - 2)
        draw.rectangle(color_box, fill=choose_class_color(label, class_names), outline="black")
        draw.text((left + height, top + 1), class_names[label], fill="black", font=font, anchor="la")
    return np.asarray(canvas)
