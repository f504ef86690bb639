"""Images with their true and predicted classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor


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
