"""Plot what models cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from vitkit.visualization.canvas import save_figure

Curve = tuple[Sequence[float], Sequence[float]]
"""Positions along the x axis, and values."""


def plot_costs(panels: Sequence[tuple[str, str, Mapping[str, Curve]]], out_path: str | Path) -> None:
    """Save a PNG with two panels per row, each with a curve for each model.

    Args:
        panels: for each panel the titles of the x axis and the y axis, and the curve of each model by its name.
        out_path: the PNG's path; its folder is made.
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
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out_path, dpi=120)
