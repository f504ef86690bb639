"""Draw videos as strips of frames."""

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.visualization.canvas import to_pil

_PER_LINE = 8
_GAP = 2  # pixels between the frames of a strip


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
