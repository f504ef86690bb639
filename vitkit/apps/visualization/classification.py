"""Images with their predicted classes, or with a caption."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vitkit.apps.visualization.canvas import break_lines, enlarge, font_for, tag_size

_BAR = (120, 170, 220)
_MOST = 5  # classes that are listed


def draw_classes(image: np.ndarray | Tensor, class_scores: Tensor, class_names: Sequence[str]) -> np.ndarray:
    """Draw the image above its most probable classes, each with a bar as long as its score.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        class_scores: (C,) in 0..1.
        class_names: C names.
    Returns:
        (H', W', 3) uint8 RGB, with the list below the image.
    """
    base, _ = enlarge(image)
    font = font_for(base)
    line = round(tag_size(ImageDraw.Draw(base), "", font)[1]) + 2
    scores, labels = class_scores.float().topk(min(_MOST, len(class_names)))
    names = [f"{score:.2f} {class_names[label]}" for label, score in zip(labels.tolist(), scores.tolist())]
    width = max(base.width, *(round(font.getlength(name)) + 8 for name in names))
    canvas = Image.new("RGB", (width, base.height + line * len(labels) + 4), "white")
    canvas.paste(base, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for k, (name, score) in enumerate(zip(names, scores.tolist())):
        top = base.height + 2 + k * line
        draw.rectangle((0, top + 1, round(score * (canvas.width - 1)), top + line - 2), fill=_BAR)
        draw.text((4, top + 1), name, fill="black", font=font, anchor="la")
    return np.asarray(canvas)


def draw_caption(image: np.ndarray | Tensor, text: str) -> np.ndarray:
    """Draw the image above its caption, wrapped to the image's width.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
    Returns:
        (H', W', 3) uint8 RGB, with the caption below the image.
    """
    base, _ = enlarge(image)
    font = font_for(base)
    line = round(tag_size(ImageDraw.Draw(base), "", font)[1])
    lines = break_lines(text or "(nothing)", font, base.width - 8)
    canvas = Image.new("RGB", (base.width, base.height + (line + 2) * len(lines) + 4), "white")
    canvas.paste(base, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for k, words in enumerate(lines):
        draw.text((4, base.height + 2 + k * (line + 2)), words, fill="black", font=font, anchor="la")
    return np.asarray(canvas)
