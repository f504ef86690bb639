"""Draw videos as strips of frames."""

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from vitkit.apps.visualization.canvas import to_pil

_PER_LINE = 8
_HEIGHT = 112  # of each frame in a strip, in pixels
_GAP = 2  # pixels between the frames of a strip


def draw_strip(frames: Sequence[np.ndarray] | Tensor, *, per_line: int = _PER_LINE) -> np.ndarray:
    """Draw frames in rows, from left to right.

    Args:
        frames: (H, W, 3) uint8 RGB arrays of one size, or a clip (3, T, H, W) uint8.
        per_line: frames per row.
    Returns:
        (H', W', 3) uint8 RGB.
    """
    frames = list(frames.unbind(1)) if isinstance(frames, Tensor) else frames
    shown = [to_pil(frame) for frame in frames]
    width = max(1, round(_HEIGHT * shown[0].width / shown[0].height))
    # Nearest-neighbor resampling keeps enlarged pixels sharp.
    resample = Image.Resampling.LANCZOS if shown[0].height > _HEIGHT else Image.Resampling.NEAREST
    columns = min(per_line, len(shown))
    lines = -(-len(shown) // columns)
    size = columns * (width + _GAP) - _GAP, lines * (_HEIGHT + _GAP) - _GAP
    canvas = Image.new("RGB", size, "white")
    for number, frame in enumerate(shown):
        line, column = divmod(number, columns)
        canvas.paste(frame.resize((width, _HEIGHT), resample), (column * (width + _GAP), line * (_HEIGHT + _GAP)))
    return np.asarray(canvas)
