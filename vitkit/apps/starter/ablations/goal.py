"""The table of a set's curves by x, and at which x each reaches the set's goal."""

import math
import statistics
from collections.abc import Mapping, Sequence

from vitkit.apps.report.intervals import difference_over_seeds, mean_over_seeds
from vitkit.apps.starter.ablations.sets import Ablation, Row

_INTERVALS = "In brackets are Student's 95 % intervals over seeds; values of one seed have none."
_NOT_SHOWN = "Not shown: at no x is the 95 % interval of the difference to the goal's runs above zero."
Curves = dict[str, dict[float, list[float]]]
"""Name of a curve -> x -> the metric with each seed."""


def goal_table(ablation: Ablation, curves: Curves, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table with a column for each curve and a row for each x, then those of the minutes, of the
    x at which each curve's mean reaches the goal, and of the first x at which its runs show that it is above it."""
    (name, at), metric = ablation.goal, ablation.metrics[0]
    goal = goal_of(ablation, curves)
    value = "not run" if goal is None else f"{goal:.3f}"
    lines = ["", f"Goal: the {metric} of {name} at {at:g} {ablation.x_label}: {value}.", ""]
    lines += ["| " + " | ".join([ablation.x_label, *curves]) + " |", "| --- |" + " ---: |" * len(curves)]

    def add(title: str, cells: Sequence[str]) -> None:
        lines.append("| " + " | ".join([title, *cells]) + " |")

    for x in sorted({x for points in ablation.curves.values() for x in points}):
        add(f"{x:g}", [_cell(curves[curve].get(x), measures=x in ablation.curves[curve]) for curve in curves])
    of_curve = {curve: [row for row in rows if row["arm"] in ablation.curves[curve].values()] for curve in curves}
    add("processor minutes", [_minutes(runs) for runs in of_curve.values()])
    if any("pretraining_minutes" in row for row in rows):
        add("with pretraining", [_minutes(runs, pretrained=True) for runs in of_curve.values()])
    if goal is not None:
        add("mean reaches the goal at", [find_reached(points, goal) for points in curves.values()])
        add("shown above the goal at", [_find_shown(points, curves[name][at]) for points in curves.values()])
    return [*lines, "", _INTERVALS if goal is None else f"{_INTERVALS} {_NOT_SHOWN}"]


def goal_of(ablation: Ablation, curves: Curves) -> float | None:
    """Return the goal of the curves, a mean over seeds; None if it has not been run."""
    if ablation.goal is None:
        return None
    curve, x = ablation.goal
    return statistics.mean(curves[curve][x]) if curves[curve].get(x) else None


def find_reached(points: Mapping[float, Sequence[float]], goal: float) -> str:
    """Return the x at which a curve reaches the goal: on the line, over log x, between the means of two neighbors."""
    means = sorted((x, statistics.mean(values)) for x, values in points.items())
    if not means:
        return "not run"
    first = next((k for k, (_, mean) in enumerate(means) if mean >= goal), None)
    if first is None:
        return f"> {means[-1][0]:g}"
    if first == 0:
        return f"≤ {means[0][0]:g}"
    (x0, mean0), (x1, mean1) = means[first - 1 : first + 1]
    return f"{x0 * (x1 / x0) ** ((goal - mean0) / (mean1 - mean0)):.0f}"


def _find_shown(points: Mapping[float, Sequence[float]], goal: Sequence[float]) -> str:
    """Return the first x at which the interval of a curve's difference to the goal's runs is above zero."""
    shown = (x for x in sorted(points) if difference_over_seeds(goal, points[x]).low > 0)  # NaN is not
    return f"{first:g}" if (first := next(shown, None)) is not None else "not shown" if points else "not run"


def _cell(values: Sequence[float] | None, *, measures: bool) -> str:
    if not values:
        return "not run" if measures else ""
    mean, low, high = mean_over_seeds(values)
    return f"{mean:.3f}" if math.isnan(low) else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _minutes(runs: Sequence[Row], *, pretrained: bool = False) -> str:
    if not runs:
        return ""
    extra = [row.get("pretraining_minutes", 0.0) if pretrained else 0.0 for row in runs]
    return f"{statistics.mean(row['processor_minutes'] + more for row, more in zip(runs, extra)):.1f}"
