"""Images with their true and predicted classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from torch import Tensor

from vitkit.visualization.canvas import enlargement, font_for, tag_size, to_picture

_BAR = (120, 170, 220)


def classification_sheet(
    rows: Sequence[tuple[np.ndarray, Mapping[str, Tensor], Mapping[str, Any]]],
    class_names: Sequence[str],
    path: str | Path,
    *,
    images_per_line: int = 4,
) -> None:
    """Saves a PNG with each image below its predicted class, and its true one where that is another.

    Args:
        rows: (image (H, W, 3) uint8 RGB, class_scores (C,), target with `label`) per image.
        class_names: C names.
        path: of the PNG; its folder is made.
        images_per_line: of the sheet.
    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("rows: got none, expected at least one image to draw.")
    across = min(images_per_line, len(rows))
    down = -(-len(rows) // across)
    figure = Figure(figsize=(2.8 * across, 3.2 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel in panels:
        panel.set_axis_off()
    for panel, (image, prediction, target) in zip(panels, rows):
        score, best = prediction["class_scores"].max(dim=0)
        right = int(best) == target["label"]
        truth = "" if right else f"\nis {class_names[target['label']]}"
        panel.imshow(image)
        panel.set_title(f"{class_names[int(best)]} {float(score):.2f}{truth}", color="green" if right else "firebrick")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")


def draw_classes(
    image: np.ndarray | Tensor,
    class_scores: Tensor,
    class_names: Sequence[str],
    *,
    most: int = 5,
    min_side: int = 320,
) -> np.ndarray:
    """The image above its most probable classes, each with a bar as long as its score.

    Args:
        image: (H, W, 3) uint8 RGB array, or (3, H, W) uint8 tensor.
        class_scores: (C,) in 0..1.
        class_names: C names.
        most: classes to list.
        min_side: an image with a shorter side below this is enlarged to it, so that text on it can be read.
    Returns:
        (H', W', 3) uint8 RGB, higher than the image by the list.
    """
    picture = to_picture(image)
    scale = enlargement(picture.size, min_side)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    font = font_for(picture)
    line = round(tag_size(ImageDraw.Draw(picture), "", font)[1]) + 2
    scores, labels = class_scores.float().topk(min(most, len(class_names)))
    sheet = Image.new("RGB", (picture.width, picture.height + line * len(labels) + 4), "white")
    sheet.paste(picture, (0, 0))
    draw = ImageDraw.Draw(sheet)
    for k, (label, score) in enumerate(zip(labels.tolist(), scores.tolist())):
        top = picture.height + 2 + k * line
        draw.rectangle((0, top + 1, round(score * (sheet.width - 1)), top + line - 2), fill=_BAR)
        draw.text((4, top + 1), f"{score:.2f} {class_names[label]}", fill="black", font=font, anchor="la")
    return np.asarray(sheet)
