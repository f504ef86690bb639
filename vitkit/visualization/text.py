"""What a model that writes text attends to in the text that it reads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.visualization.canvas import save_figure

_CELL = 0.3  # inches
_MARGIN = 1.6
_LONGEST_SIDE = 24.0


def draw_alignment(
    attention: Tensor, source_tokens: Sequence[str], target_tokens: Sequence[str], path: str | Path
) -> None:
    """Save a PNG of an alignment matrix (Bahdanau et al. 2015, figure 3): a row for each written token, a column for
    each token of the source, white where the row's token attended.

    Args:
        attention: (T, S) in 0..1.
        source_tokens: S tokens.
        target_tokens: T tokens.
        path: of the PNG; its folder is made.
    Raises:
        ValueError: the tokens are not as many as the rows and columns, or there are none.
    """
    shape = (len(target_tokens), len(source_tokens))
    if tuple(attention.shape) != shape or 0 in shape:
        raise ValueError(
            f"attention: got {tuple(attention.shape)} for {shape[0]} written and {shape[1]} read tokens; expected one "
            "row and one column for each, at least one."
        )
    height, width = (_MARGIN + _CELL * count for count in shape)
    scale = min(1.0, _LONGEST_SIDE / max(height, width))
    figure = Figure(figsize=(max(width * scale + 0.8, 3.2), max(height * scale, 2.4)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(np.asarray(attention), cmap="gray", vmin=0.0, vmax=1.0, aspect="equal")
    axes.set_xticks(range(shape[1]), source_tokens, rotation=90)
    axes.set_yticks(range(shape[0]), target_tokens)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="0.25", linewidth=0.4)
    axes.tick_params(which="both", length=0)
    figure.colorbar(shown, ax=axes, label="attention", shrink=min(1.0, 6 / max(height, width)))
    save_figure(figure, path, dpi=120)
