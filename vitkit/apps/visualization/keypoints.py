"""Keypoints with the limbs between them, drawn on images."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import Labels, Scores, enlarge
from vitkit.structures import KeypointInfo

_COLORS = {"left": (40, 200, 255), "right": (255, 140, 0), "": (80, 230, 80)}
"""RGB of the points and limbs of the left side, the right side, and the middle."""
_MAX_POINTS = 100_000


def draw_keypoints(
    image: np.ndarray | Tensor,
    keypoints: np.ndarray | Tensor,
    info: KeypointInfo | None,
    *,
    boxes_xyxy: np.ndarray | Tensor | None = None,
    labels: Labels = (),
    class_names: Sequence[str] = (),
    scores: Scores | None = None,
    min_side: int = 320,
) -> np.ndarray:
    """Draw boxes, if there are any, and points with limbs on a copy of the image.

    Points that are not labeled (visibility 0), or predicted with a confidence below 0.5, are left out, hidden ones
    (visibility 1) hollow. Pairs that a mirrored image exchanges have two colors; of each, the first is the left one.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        keypoints: (N, K, 3) x, y in pixels of the image, and visibility if there are no scores, or else confidence.
        info: the limbs and pairs; None: only points are drawn.
        boxes_xyxy, labels, class_names, scores, min_side: see `draw_detections`.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    _, scale = enlarge(image, min_side)
    drawn = np.asarray(enlarge(image, min_side)[0])
    if boxes_xyxy is not None:
        drawn = draw_detections(image, boxes_xyxy, labels, class_names, scores, min_side=min_side)
    canvas = Image.fromarray(drawn)
    draw = ImageDraw.Draw(canvas)
    line = max(2, round(min(canvas.size) / 200))
    points = torch.as_tensor(keypoints, dtype=torch.float32).nan_to_num().clone()
    points[..., :2] *= scale
    # Pillow takes time in proportion to what is drawn, even outside of the image.
    points[..., :2] = points[..., :2].clamp(-line, max(canvas.size) + line)
    if scores is not None:
        points[..., 2] = torch.where(points[..., 2] >= 0.5, 2.0, 0.0)
    sides = _sides(info, points.shape[1])
    for object_points in points[: _MAX_POINTS // max(1, points.shape[1])].tolist():
        for a, b in () if info is None else info.skeleton:
            (x0, y0, seen_a), (x1, y1, seen_b) = object_points[a], object_points[b]
            if seen_a and seen_b:
                side = sides[a] if sides[a] == sides[b] else sides[a] or sides[b] if "" in (sides[a], sides[b]) else ""
                draw.line((x0, y0, x1, y1), fill=_COLORS[side], width=line)
        for side, (x, y, seen) in zip(sides, object_points):
            radius = 1.5 * line + 1
            if seen:
                fill = _COLORS[side] if seen == 2 else None
                outline = (0, 0, 0) if seen == 2 else _COLORS[side]
                box = (x - radius, y - radius, x + radius, y + radius)
                draw.ellipse(box, fill=fill, outline=outline, width=1 if seen == 2 else line)
    return np.asarray(canvas)


def _sides(info: KeypointInfo | None, count: int) -> list[str]:
    """Return "left", "right" or "" for each point, by its name or else by its place in a pair."""
    sides = [""] * count
    for pair in () if info is None else info.flip_pairs:
        a, b = pair if "right" not in info.names[pair[0]].lower() else pair[::-1]
        sides[a], sides[b] = "left", "right"
    return sides
