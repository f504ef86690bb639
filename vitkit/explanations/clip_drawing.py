"""Draw what a model attends to in a clip, over space and time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.explanations.drawing import mark_point, overlay_attention
from vitkit.visualization.canvas import enlarge, save_figure


def draw_clip_attention(
    clip: Tensor,
    class_token: Tensor,
    points: Sequence[tuple[tuple[int, float, float], Tensor]],
    path: str | Path,
    *,
    title: str = "",
    most_frames: int = 8,
) -> None:
    """Save a PNG: the frames of a clip, the class token's attention map for each, and what chosen points attend to.

    (Figure 7 of https://arxiv.org/abs/2102.05095, in which brighter means more.) The class token's map of each frame is
    scaled to its largest weight in that frame; the maps of a point share one scale over all frames.

    Args:
        clip: (3, T, H, W) uint8.
        class_token: (h, w, T), the class token's attention.
        points: for each point its (frame, x, y), in pixels of the clip, and its attention (h, w, T).
        path: the PNG's path; its folder is made.
        title: the figure's title.
        most_frames: the maximum number of frames to draw, spread over the clip and including those of the points.
    """
    num_frames = clip.shape[1]
    chosen = {frame for (frame, _, _), _ in points}
    spread = np.linspace(0, num_frames - 1, min(most_frames, num_frames)).astype(int).tolist()
    frames = sorted(chosen | set(spread))
    rows = 2 + len(points)
    figure = Figure(figsize=(1.7 * len(frames) + 0.8, 1.75 * rows + 0.5), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    axes = figure.subplots(rows, len(frames), squeeze=False)
    labels = ["frames", "class token", *(f"point {number}" for number in range(1, 1 + len(points)))]
    for row, label in zip(axes, labels):
        row[0].set_ylabel(label)
        for panel in row:
            panel.set(xticks=[], yticks=[])
    images = {frame: _enlarged(clip[:, frame]) for frame in frames}
    scale = images[frames[0]].shape[0] / clip.shape[2]
    for column, frame in enumerate(frames):
        image = images[frame]
        axes[0, column].imshow(image)
        axes[0, column].set_title(f"frame {frame}", fontsize="small")
        axes[1, column].imshow(overlay_attention(image, class_token[..., frame]))
        for number, ((at_frame, x, y), weights) in enumerate(points, start=1):
            panel = axes[1 + number, column]
            panel.imshow(overlay_attention(image, weights[..., frame], largest=float(weights.max())))
            if frame == at_frame:
                for marked in (axes[0, column], panel):
                    mark_point(marked, (x * scale, y * scale), number)
    save_figure(figure, path, dpi=120)


def _enlarged(frame: Tensor) -> np.ndarray:
    return np.asarray(enlarge(frame, 160)[0])
