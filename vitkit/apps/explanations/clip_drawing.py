"""Draw what a model attends to in a clip, over space and time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.apps.explanations.drawing import NUM_ARROWS, mark_point, overlay_attention
from vitkit.apps.visualization.canvas import enlarge, save_figure

_MAX_FRAMES = 8
_SIDE = 160
_GAP = 6

MarkedPoint = tuple[tuple[int, float, float], Tensor]
"""(frame, x, y) in pixels of the clip, and the point's attention (h, w, T'); T' frames of keys may be fewer than the
clip's T."""


def draw_clip_attention(
    clip: Tensor,
    class_token: Tensor | None,
    points: Sequence[MarkedPoint],
    path: str | Path,
    *,
    title: str = "",
    max_frames: int = _MAX_FRAMES,
) -> None:
    """Save a PNG: the frames of a clip, the class token's attention map for each, and what chosen points attend to.

    (Figure 7 of https://arxiv.org/abs/2102.05095, in which brighter means more.) The class token's map of each frame is
    scaled to its largest weight in that frame; the maps of a point share one scale over all frames.

    Args:
        clip: (3, T, H, W) uint8.
        class_token: (h, w, T'), the class token's attention; None: it has no row.
        points: the points and their attention.
        path: the PNG's path; its folder is made.
        title: the figure's title.
        max_frames: the maximum number of frames to draw, spread over the clip and including those of the points.
    """
    num_frames = clip.shape[1]
    chosen = {frame for (frame, _, _), _ in points}
    frames = sorted(chosen | set(_spread(num_frames, max_frames)))
    maps = [] if class_token is None else [("class token", class_token)]
    maps += [(f"point {number}", weights) for number, (_, weights) in enumerate(points, start=1)]
    rows = 1 + len(maps)
    panel = 1.7 * clip.shape[2] / clip.shape[3] + 0.1
    figure = Figure(figsize=(1.7 * len(frames) + 0.8, panel * rows + 0.8), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(rows, len(frames), squeeze=False)
    for row, label in zip(axes, ("frames", *(name for name, _ in maps))):
        row[0].set_ylabel(label)
        for panel in row:
            panel.set(xticks=[], yticks=[])
    for column, frame in enumerate(frames):
        image, scale = _enlarge(clip[:, frame])
        axes[0, column].imshow(image)
        axes[0, column].set_title(f"frame {frame}", fontsize="small")
        for row, (name, weights) in zip(axes[1:], maps):
            largest = None if name == "class token" else float(weights.max())
            of_frame = weights[..., frame * weights.shape[2] // num_frames]
            row[column].imshow(overlay_attention(image, of_frame, largest=largest))
        for number, ((at_frame, x, y), _) in enumerate(points, start=1):
            if frame == at_frame:
                for panel in (axes[0, column], axes[len(maps) - len(points) + number, column]):
                    mark_point(panel, (x * scale, y * scale), number)
    save_figure(figure, path, dpi=120)


def draw_clip_arrows(clip: Tensor, points: Sequence[MarkedPoint], path: str | Path, *, title: str = "") -> None:
    """Save a PNG of frames side by side, and arrows from each point to the locations in all of them that it weights
    most (Wang et al. 2018, https://arxiv.org/abs/1711.07971, figure 3); a row for each point.

    Args:
        clip: (3, T, H, W) uint8.
        points: the points and their attention; there is a frame for each of its T' frames, or for `_MAX_FRAMES` of
            them.
        path: the PNG's path; its folder is made.
        title: the beginning of the figure's title.
    """
    num_frames, num_keys = clip.shape[1], points[0][1].shape[2]
    own = {frame * num_keys // num_frames for (frame, _, _), _ in points}
    keys = sorted(own | set(_spread(num_keys, _MAX_FRAMES)))
    # The clip's frame in the middle of those that a frame of keys stands for; a point's own frame is shown itself.
    shown = {key: int((key + 0.5) * num_frames / num_keys) for key in keys}
    shown |= {frame * num_keys // num_frames: frame for (frame, _, _), _ in points}
    images = [_enlarge(clip[:, frame]) for frame in shown.values()]
    (height, width), scale = images[0][0].shape[:2], images[0][1]
    strip = np.full((height, len(images) * (width + _GAP) - _GAP, 3), 255, np.uint8)
    for i, (image, _) in enumerate(images):
        strip[:, i * (width + _GAP) :][:, :width] = image
    size = (max(1.7 * len(images) + 0.4, 6.0), (1.7 * height / width + 0.1) * len(points) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(points), 1, squeeze=False)[:, 0]
    num_arrows = 0
    for number, (axis, ((frame, x, y), weights)) in enumerate(zip(axes, points), start=1):
        axis.imshow(strip)
        axis.set_axis_off()
        start = keys.index(frame * num_keys // num_frames) * (width + _GAP) + x * scale, y * scale
        visible = weights[..., keys]
        values, cells = visible.flatten().topk(min(NUM_ARROWS, visible.numel()))
        num_arrows = max(num_arrows, len(values))
        rows, columns, count = visible.shape
        for value, cell in zip(values.tolist(), cells.tolist()):
            row, rest = divmod(cell, columns * count)
            column, i = divmod(rest, count)
            end = i * (width + _GAP) + (column + 0.5) * width / columns, (row + 0.5) * height / rows
            strength = max(value, 0) / max(float(values[0]), 1e-12)
            style = dict(arrowstyle="->", color="#ffe000", alpha=0.3 + 0.7 * strength, linewidth=0.7 + strength)
            axis.annotate("", xy=end, xytext=start, arrowprops=style)
        mark_point(axis, start, number)
    at = ", ".join(f"{frame}" for frame in shown.values())
    figure.suptitle(f"{title}: the {num_arrows} locations with the largest weights in frames {at}", fontsize="medium")
    save_figure(figure, path, dpi=120)


def _spread(count: int, limit: int) -> list[int]:
    """Return at most `limit` indices below `count`, evenly spaced from the first to the last."""
    return np.linspace(0, count - 1, min(limit, count)).astype(int).tolist()


def _enlarge(frame: Tensor) -> tuple[np.ndarray, float]:
    """Return a frame (3, H, W) at a readable size, and the factor by which it was enlarged."""
    image = np.asarray(enlarge(frame, _SIDE)[0])
    return image, image.shape[0] / frame.shape[1]
