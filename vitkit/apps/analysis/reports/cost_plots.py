"""Plots of models' costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from vitkit.apps.visualization.canvas import save_figure

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


@dataclass(frozen=True)
class Accuracy:
    """A classifier in a plot of accuracy against cost."""

    family: str
    """Classifiers of a family are connected."""
    label: str
    """Stands beside the point."""
    macs: float
    top1: float
    """In percent."""
    pretraining: str = ""
    """The dataset that it was pretrained on, if there is another one; its marker is hollow then."""


def plot_accuracy(classifiers: Sequence[Accuracy], out_path: str | Path) -> None:
    """Save a plot of top-1 against G MACs on a logarithmic axis.

    Args:
        out_path: the file's path; its folder is made.
    """
    figure = Figure(figsize=(9.0, 5.5), layout="constrained")
    axes = figure.add_subplot()
    colors = {family: f"C{k}" for k, family in enumerate(dict.fromkeys(item.family for item in classifiers))}
    for family, color in colors.items():
        for pretraining in sorted({item.pretraining for item in classifiers if item.family == family}):
            points = sorted(
                (item.macs / 1e9, item.top1, item.label)
                for item in classifiers
                if (item.family, item.pretraining) == (family, pretraining)
            )
            style = dict(linestyle="--", markerfacecolor="none") if pretraining else dict(linestyle="-")
            macs, top1, labels = zip(*points)
            label = f"{family}, {pretraining}" if pretraining else family
            axes.plot(macs, top1, marker="o", markersize=5, color=color, label=label, **style)
            for x, y, text in zip(macs, top1, labels):
                axes.annotate(text, (x, y), (4, -9), textcoords="offset points", fontsize=7, color=color)
    axes.set(xscale="log", xlabel="G MACs of an image", ylabel="ImageNet-1k top-1, %")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if _within(tick, axes.get_xlim())]
    axes.set_xticks(ticks, map(str, ticks))
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, out_path, dpi=120)


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]
