"""Heat maps of the similarity of layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from vitkit.apps.visualization.canvas import save_figure

_MOST_TICKS = 14


@dataclass(frozen=True)
class SimilarityPanel:
    """A heat map of the layers of two networks, which may be the same."""

    across: str
    """The network along the x axis."""
    up: str
    layers_across: Sequence[str]
    layers_up: Sequence[str]
    values: np.ndarray
    """(layers up, layers across), 0 to 1."""


def plot_layer_similarity(panels: Sequence[SimilarityPanel], out_path: str | Path, *, measure: str) -> None:
    """Save a PNG of heat maps beside each other, with the first layers at the lower left.

    Args:
        out_path: the PNG's path; its folder is made.
        measure: title of the color bar.
    """
    figure = Figure(figsize=(6.2 * len(panels) + 0.8, 6.2), layout="constrained")
    for k, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), k)
        image = axes.imshow(panel.values, origin="lower", cmap="magma", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set(xlabel=f"layers of {panel.across}", ylabel=f"layers of {panel.up}")
        positions = _ticks(len(panel.layers_across))
        axes.set_xticks(positions, [panel.layers_across[i] for i in positions], rotation=90, fontsize=7)
        positions = _ticks(len(panel.layers_up))
        axes.set_yticks(positions, [panel.layers_up[i] for i in positions], fontsize=7)
    figure.colorbar(image, ax=figure.axes, label=measure, shrink=0.8)
    save_figure(figure, out_path, dpi=120)


def _ticks(number: int) -> list[int]:
    return sorted(set(np.linspace(0, number - 1, min(number, _MOST_TICKS)).round().astype(int).tolist()))
