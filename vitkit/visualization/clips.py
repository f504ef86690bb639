"""Draw videos as images: strips of frames, and the classes of clips over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitkit.visualization.canvas import class_color, save_figure, to_pil

_PER_LINE = 8
_GAP = 2  # pixels between the frames of a strip
_MAX_CLASSES = 5


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
    shown = [to_pil(frame) for frame in frames]
    width = max(1, round(height * shown[0].width / shown[0].height))
    # Nearest-neighbor resampling keeps enlarged pixels sharp.
    resample = Image.Resampling.LANCZOS if shown[0].height > height else Image.Resampling.NEAREST
    columns = min(per_line, len(shown))
    lines = -(-len(shown) // columns)
    size = columns * (width + _GAP) - _GAP, lines * (height + _GAP) - _GAP
    canvas = Image.new("RGB", size, "white")
    for number, frame in enumerate(shown):
        line, column = divmod(number, columns)
        canvas.paste(frame.resize((width, height), resample), (column * (width + _GAP), line * (height + _GAP)))
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
    mean, labels = scores.mean(dim=0).topk(min(_MAX_CLASSES, len(class_names)))
    for rank, (label, score) in enumerate(zip(labels.tolist(), mean.tolist())):
        color = np.array(class_color(rank)) / 255
        # Each clip is a horizontal line from its first frame to its last, with a point in the middle.
        below.hlines(scores[:, label], *times.T, color=color, alpha=0.4, linewidth=2)
        middle = times.mean(axis=1)
        below.plot(middle, scores[:, label], "o-", color=color, label=f"{class_names[label]}  {score:.2f}")
    below.set(ylim=(-0.03, 1.03), xlabel="seconds", ylabel="score of each clip")
    below.legend(title="mean of the clips", fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, path, dpi=110)
