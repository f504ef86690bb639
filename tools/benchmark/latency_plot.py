"""Plot published AP against measured latency: the figure that decides which model to take, and how to run it."""

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from vitkit.apps.visualization.canvas import save_figure
from vitkit.errors import DataError
from vitkit.tools.benchmark.timing import Measurement

STYLES = {
    "vitkit": ("#0072b2", "o", "-"),
    "vitkit, compiled": ("#56b4e9", "s", "-"),
    "vitkit, ONNX Runtime": ("#009e73", "^", "-"),
    "vitkit, ONNX Runtime int8": ("#8fbc3f", "v", "-"),
    "vitkit, OpenVINO": ("#333333", "D", "-"),
    "transformers": ("#d55e00", "o", "--"),
    "transformers, compiled": ("#e69f00", "s", "--"),
    "official code": ("#cc79a7", "P", "--"),
    "file from outside, ONNX Runtime": ("#009e73", "X", ":"),
    "file from outside, OpenVINO": ("#333333", "X", ":"),
}
"""Name of a row -> color, marker and line, which colorblind readers can tell apart (Okabe and Ito)."""
_GAP = 0.045
"""The least distance between two names of models, as a fraction of the figure's height."""


def plot_latencies(rows: Sequence[Measurement], out_path: str | Path, *, title: str) -> None:
    """Save a PNG with a panel for each setting: a line for each way to run the models, through those that no other one
    beats in both time and AP; the others are points.

    Args:
        rows: those without a published AP or a time are left out.
        out_path: the PNG's path; its folder is made.
    Raises:
        DataError: no row has both.
    """
    rows = [row for row in rows if row.published_ap is not None and row.seconds is not None]
    if not rows:
        raise DataError(f"--plot {out_path}: there is no row with a published AP that could be measured.")
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure = Figure(figsize=(8.4 * len(settings), 5.6), layout="constrained")
    panels = figure.subplots(1, len(settings), squeeze=False)[0]
    for axes, setting in zip(panels, settings):
        shown = [row for row in rows if row.setting == setting]
        for name in sorted({row.name for row in shown}, key=list(STYLES).index):
            _draw(axes, name, [row for row in shown if row.name == name])
        axes.set(xscale="log", xlabel="milliseconds, measured", ylabel="COCO AP, published for float32", title=setting)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        _name_models(axes, shown)
    labels = {line.get_label(): line for axes in panels for line in axes.lines if line.get_label()[0] != "_"}
    handles = [labels[name] for name in STYLES if name in labels]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(textwrap.fill(title, 120 * len(settings)), fontsize=8)
    save_figure(figure, out_path, dpi=110)


def _draw(axes: Axes, name: str, rows: Sequence[Measurement]) -> None:
    color, marker, line = STYLES[name]
    points = sorted((1e3 * row.seconds, row.published_ap) for row in rows)
    best: list[tuple[float, float]] = []  # with each slower model more accurate
    for point in points:
        if not best or point[1] > best[-1][1]:
            best.append(point)
    style = dict(color=color, marker=marker, markersize=6, markeredgecolor="white", markeredgewidth=0.5)
    axes.plot(*zip(*best), line, linewidth=1.4, label=name, **style)
    others = [point for point in points if point not in best]
    if others:
        axes.plot(*zip(*others), linestyle="", alpha=0.8, **style)


def _name_models(axes: Axes, rows: Sequence[Measurement]) -> None:
    """Write the models' names in a column at the right, each joined to its slowest point."""
    slowest: dict[str, tuple[float, float]] = {}
    for row in rows:
        model = row.what.partition(",")[0]
        slowest[model] = max(slowest.get(model, (0.0, 0.0)), (1e3 * row.seconds, row.published_ap))
    ordered = sorted(slowest.items(), key=lambda item: item[1][1])
    to_axes = axes.transAxes.inverted()
    heights = [float(to_axes.transform(axes.transData.transform(point))[1]) for _, point in ordered]
    for before, number in pairwise(range(len(heights))):
        heights[number] = max(heights[number], heights[before] + _GAP)
    for (model, point), height in zip(ordered, heights):
        axes.annotate(
            f"{model} {point[1]:.1f}", point, (1.03, height), textcoords="axes fraction", va="center", fontsize=8,
            arrowprops=dict(arrowstyle="-", color="0.75", linewidth=0.6, shrinkA=1, shrinkB=4), annotation_clip=False,
        )  # fmt: skip
