"""Captions below their pictures."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

_COLUMNS = 4
_PANEL = 3.2  # inches of a panel's width
_LINE = 36  # letters


def caption_sheet(
    rows: Sequence[tuple[np.ndarray, Mapping[str, Any], Mapping[str, Any]]], classes: Sequence[str], path: str | Path
) -> None:
    """Saves a PNG with the predicted caption of each image and its first reference.

    Args:
        rows: image (H, W, 3) uint8 RGB, prediction with `text`, target with `references`.
        classes: what other sheets name; captions have none.
        path: of the PNG; its folder is made.
    """
    lines = -(-len(rows) // _COLUMNS)
    figure = Figure(figsize=(_PANEL * min(len(rows), _COLUMNS), (_PANEL + 1.1) * lines), layout="constrained")
    for number, (image, prediction, target) in enumerate(rows, start=1):
        panel = figure.add_subplot(lines, min(len(rows), _COLUMNS), number)
        panel.imshow(image)
        panel.set(xticks=[], yticks=[])
        written = textwrap.fill(prediction["text"] or "(nothing)", _LINE)
        panel.set_title(written, fontsize="small", fontweight="bold")
        panel.set_xlabel(textwrap.fill(target["references"][0], _LINE), fontsize="small", color="0.35")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
