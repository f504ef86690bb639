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
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out_path, dpi=120)


def plot_layer_costs(kinds: Mapping[str, Sequence[tuple[int, float, float, float]]], out_path: str | Path) -> None:
    """Save a PNG of what layers cost by length: MACs, counted and by formula, and time.

    Args:
        kinds: by the layer's name, at each length: tokens, MACs, MACs by its formula, seconds.
        out_path: of the PNG; its folder is made.
    """
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    macs, times = figure.subplots(1, 2)
    for number, (name, rows) in enumerate(kinds.items()):
        lengths, counted, formula, seconds = zip(*rows)
        macs.plot(lengths, [value / 1e6 for value in formula], color=f"C{number}", linewidth=1)
        macs.plot(lengths, [value / 1e6 for value in counted], "o", color=f"C{number}", markersize=5, label=name)
        times.plot(lengths, [value * 1e3 for value in seconds], "o-", color=f"C{number}", markersize=5, label=name)
    macs.plot([], [], color="grey", linewidth=1, label="by formula")
    macs.set(ylabel="million MACs")
    times.set(ylabel="ms, forward pass")
    for axes in (macs, times):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="tokens")
        axes.set_xticks(sorted({row[0] for rows in kinds.values() for row in rows}))
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out_path, dpi=120)
