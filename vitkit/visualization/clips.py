"""Draw videos as pictures: strips of frames, the classes of clips over time, attention over space and time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitkit.visualization.attention import mark_point, overlay_attention
from vitkit.visualization.canvas import class_color, enlarge, save_figure, to_picture

_PER_LINE = 8
_GAP = 2  # pixels between the frames of a strip
_MOST_CLASSES = 5


def draw_strip(frames: Sequence[np.ndarray] | Tensor, *, height: int = 112, per_line: int = _PER_LINE) -> np.ndarray:
    """Draw frames in rows, from left to right.

    Args:
        frames: (H, W, 3) uint8 RGB arrays of one size, or a clip (3, T, H, W) uint8.
        height: height of each frame in the strip, in pixels.
        per_line: frames per row.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    frames = list(frames.unbind(1)) if isinstance(frames, Tensor) else frames
    pictures = [to_picture(frame) for frame in frames]
    width = max(1, round(height * pictures[0].width / pictures[0].height))
    # Nearest-neighbour resampling keeps enlarged pixels sharp.
    resample = Image.Resampling.LANCZOS if pictures[0].height > height else Image.Resampling.NEAREST
    columns = min(per_line, len(pictures))
    lines = -(-len(pictures) // columns)
    size = columns * (width + _GAP) - _GAP, lines * (height + _GAP) - _GAP
    canvas = Image.new("RGB", size, "white")
    for number, picture in enumerate(pictures):
        line, column = divmod(number, columns)
        canvas.paste(picture.resize((width, height), resample), (column * (width + _GAP), line * (height + _GAP)))
    return np.asarray(canvas)


def draw_scores_over_time(
    frames: Sequence[np.ndarray], times: np.ndarray, scores: Tensor, class_names: Sequence[str], path: str | Path
) -> None:
    """Save a PNG: a strip of a video's frames, and below it the scores of its five best classes over time.

    Args:
        frames: (H, W, 3) uint8 RGB, spread over the video.
        times: (clips, 2) seconds at which each clip begins and ends.
        scores: (clips, C) in 0..1.
        class_names: C names.
        path: the PNG's path; its folder is made.
    """
    strip = draw_strip(frames, per_line=len(frames))
    figure = Figure(figsize=(10, 10 * strip.shape[0] / strip.shape[1] + 3), layout="constrained")
    top, below = figure.subplots(2, height_ratios=[strip.shape[0] / strip.shape[1] * 10, 3])
    top.imshow(strip)
    top.set_axis_off()
    mean, labels = scores.mean(dim=0).topk(min(_MOST_CLASSES, len(class_names)))
    for rank, (label, score) in enumerate(zip(labels.tolist(), mean.tolist())):
        color = np.array(class_color(rank)) / 255
        # Each clip is a horizontal line from its first frame to its last, with a point in the middle.
        below.hlines(scores[:, label], *times.T, color=color, alpha=0.4, linewidth=2)
        middle = times.mean(axis=1)
        below.plot(middle, scores[:, label], "o-", color=color, label=f"{class_names[label]}  {score:.2f}")
    below.set(ylim=(-0.03, 1.03), xlabel="seconds", ylabel="score of each clip")
    below.legend(title="mean of the clips", fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path, dpi=110)


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
