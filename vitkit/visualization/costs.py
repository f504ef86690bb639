"""Curves of what models cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vitkit.visualization.canvas import save_figure

Curve = tuple[Sequence[float], Sequence[float]]
"""Positions and values."""


def plot_costs(panels: Sequence[tuple[str, str, Mapping[str, Curve]]], out_path: str | Path) -> None:
    """Save a PNG with two panels in a row, each over what changes and with a curve for each model.

    Args:
        panels: the titles of the axes across and up, and the curves by their models' names.
        out_path: of the PNG; its folder is made.
    """
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(10.5, 4.0 * rows), layout="constrained")
    for k, (across, up, curves) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, 2, k)
        for name, (positions, values) in curves.items():
            axes.plot(positions, values, marker="o", markersize=4, label=name)
        axes.set(xlabel=across, ylabel=up, ylim=(0, None))
        axes.set_xticks(sorted({x for positions, _ in curves.values() for x in positions}))
        axes.grid(alpha=0.3)
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out_path, dpi=120)
