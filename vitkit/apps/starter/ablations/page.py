"""The table and the plot of a set's results."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitkit.apps.analysis.compute_frontier import OPERATIONS, FittedScalingLaw, fit_scaling_law
from vitkit.apps.analysis.power_law import PowerLaw, fit_power_law
from vitkit.apps.report.intervals import difference_over_seeds
from vitkit.apps.starter.ablations.goal import Curves, goal_of, goal_table
from vitkit.apps.starter.ablations.sets import Ablation, Row, name_of, summary_of, train_command
from vitkit.apps.visualization.canvas import save_figure
from vitkit.io.output import write_text

_SHOWN = ("vitkit", "torch", "torchvision")


def write_page(ablation: Ablation, path: Path, rows: Sequence[Row], out: Path) -> None:
    """Write a set's table and plot, and the plot of its compute frontier if it has one."""
    frontier = fit_frontier(ablation, rows) if ablation.frontier is not None and rows else None
    write_text(out / f"{path.stem}.md", table(ablation, path, rows, frontier))
    plot(ablation, rows, out / f"{path.stem}.png")
    if isinstance(frontier, FittedScalingLaw):
        plot_frontier(frontier, _frontier_runs(ablation, rows), ablation.metrics[0], out / f"{path.stem}_frontier.png")


def table(ablation: Ablation, path: Path, rows: Sequence[Row], frontier: FittedScalingLaw | str | None = None) -> str:
    """Return the markdown page of a set: the last evaluation of each arm, mean and standard deviation over seeds.

    Args:
        frontier: the result of `fit_frontier`, which the page then has as well.
    """
    lines = [f"# {path.stem}", "", summary_of(path), ""]
    if ablation.goal:
        lines[-1:] = [*goal_table(ablation, collect_last_values(ablation, rows), rows), ""]
    pretrained = any("pretraining_minutes" in row for row in rows)
    columns = ["arm", "seeds", "epochs", "steps", "processor minutes", *["of pretraining"] * pretrained]
    columns += ablation.metrics
    lines += ["| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    any_earlier = False
    for arm in ablation.arms:
        runs = [row for row in rows if row["arm"] == arm]
        if not runs:
            lines.append(f"| {arm} | not run |" + " |" * (len(columns) - 2))
            continue
        earlier = any(_is_earlier(ablation, row) for row in runs)
        any_earlier |= earlier
        cells = [f"{arm} †" if earlier else arm, ", ".join(str(row["seed"]) for row in runs)]
        # With a time instead of epochs, seeds may differ in these.
        cells += [", ".join(map(str, sorted({row[key] for row in runs}))) for key in ("epochs", "steps")]
        cells.append(f"{statistics.mean(row['processor_minutes'] for row in runs):.1f}")
        if pretrained:
            cells.append(f"{statistics.mean(row.get('pretraining_minutes', 0.0) for row in runs):.1f}")
        for metric in ablation.metrics:
            cells.append(_mean_and_spread([row["evaluations"][-1]["metrics"].get(metric) for row in runs]))
        lines.append("| " + " | ".join(cells) + " |")
    if any_earlier:
        lines += ["", "† measured with earlier settings than the set has now; see its command."]
    lines += _differences(ablation, rows)
    if ablation.power_law and rows:
        lines += ["", f"Power laws of {ablation.metrics[0]}, a x^-b; x is {ablation.x_label}:", ""]
        lines += [f"- {name}: {law}" for name, law in power_laws(collect_last_values(ablation, rows)).items()]
    if frontier is not None:
        lines += _frontier_lines(frontier, ablation, path, _frontier_runs(ablation, rows))
    if rows:
        versions = sorted({", ".join(f"{k} {v}" for k, v in row["versions"].items() if k in _SHOWN) for row in rows})
        threads = sorted({f"{row['threads']} thread(s) of {row['device']}" for row in rows})
        command = shlex.join(["vitkit", "ablate", name_of(path)])
        lines += ["", f"`{command}`; {'; '.join(versions)}; {'; '.join(threads)}."]
        lines += [f"The command of each run is in [{path.stem}.json]({path.stem}.json).", ""]
        lines += [f"![{ablation.metrics[0]} of each arm]({path.stem}.png)"]
    return "\n".join(lines) + "\n"


def _frontier_runs(ablation: Ablation, rows: Sequence[Row]) -> np.ndarray:
    """Return (runs, 3): N, D and the last value of the first metric of the runs in `frontier`."""
    metric, sizes = ablation.metrics[0], ablation.frontier or {}
    found = [(*sizes[row["arm"]], _metric(row["evaluations"][-1], metric)) for row in rows if row["arm"] in sizes]
    return np.array(found, float).reshape(-1, 3)


def fit_frontier(ablation: Ablation, rows: Sequence[Row]) -> FittedScalingLaw | str:
    """Return the law of the runs in `frontier`, or why they have none."""
    try:
        return fit_scaling_law(*_frontier_runs(ablation, rows).T, least=ablation.least_loss)
    except ValueError as error:
        return str(error)


def _frontier_lines(fitted: FittedScalingLaw | str, ablation: Ablation, path: Path, runs: np.ndarray) -> list[str]:
    """Return the fitted law, and a table of the best N and D for amounts of compute within those of the runs."""
    lines = ["", f"{ablation.metrics[0]} by parameters N, without embeddings, and training tokens D: {fitted}"]
    if isinstance(fitted, str):
        return lines
    lines[-1] += "."
    if ablation.least_loss + 0.01 * runs[:, 2].min() > fitted.law.E:
        lines[-1] += f" E is at its least, {ablation.least_loss:g}: the runs do not tell how low the loss can get."
    if not fitted.describes_runs:
        lines[-1] += f" It misses the runs by {fitted.misfit:.0%}, and seeds differ by {fitted.scatter:.0%}: the form"
        lines[-1] += " does not hold here, and all intervals are too narrow."
    if not fitted.is_determined:
        return [*lines, "", "An exponent is not determined by these runs, so no best N and D is given."]
    a, b = fitted.law.exponents
    (a_low, a_high), (b_low, b_high) = fitted.exponent_intervals()
    lines += ["", f"The best N grows as C^{a:.2f} ({a_low:.2f} to {a_high:.2f}) with compute C = {OPERATIONS} N D,"]
    lines[-1] += f" and the best D as C^{b:.2f} ({b_low:.2f} to {b_high:.2f})."
    lines += ["", f"| C, operations | best N | best D | {ablation.metrics[0]} |", "| ---: | ---: | ---: | ---: |"]
    compute = OPERATIONS * runs[:, 0] * runs[:, 1]
    any_outside = False
    for c in np.geomspace(compute.min(), compute.max(), 4):
        (n, d), ranges = fitted.law.optimum(c), fitted.optimum_intervals(c)
        outside = not all(values.min() <= x <= values.max() for x, values in zip((n, d), runs.T))
        any_outside |= outside
        cells = [f"{x:,.0f} ({low:,.0f} to {high:,.0f})" for x, (low, high) in zip((n, d), ranges)]
        lines.append(f"| {c:.2g}{' †' * outside} | {' | '.join(cells)} | {fitted.law.loss(n, d):.3f} |")
    lines += ["", "In brackets are 95 % intervals of a bootstrap over the runs."]
    if any_outside:
        lines[-1] += " † N or D is outside those of the runs: extrapolated."
    return [*lines, "", f"![The compute frontier]({path.stem}_frontier.png)"]


def plot_frontier(fitted: FittedScalingLaw, runs: np.ndarray, metric: str, path: Path) -> None:
    """Draw the loss against compute for each N, with the frontier, and the best N against compute, with its
    interval."""
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    compute = OPERATIONS * runs[:, 0] * runs[:, 1]
    line = np.geomspace(compute.min(), compute.max())
    for number, n in enumerate(sorted(set(runs[:, 0]))):
        rows, style = runs[:, 0] == n, dict(color=f"C{number % 10}")
        left.plot(compute[rows], runs[rows, 2], marker="o", markersize=4, linestyle="none", **style)
        curve = np.geomspace(compute[rows].min(), compute[rows].max())
        left.plot(curve, fitted.law.loss(n, curve / (OPERATIONS * n)), label=f"N = {n:,.0f}", **style)
        right.plot(compute[rows], runs[rows, 0], marker="o", markersize=4, linestyle="none", **style)
    left.plot(line, fitted.law.loss(*fitted.law.optimum(line)), color="0.2", linestyle="--", label="best N")
    best = np.array([law.optimum(line)[0] for law in fitted.resamples])
    low, high = np.quantile(best, [0.025, 0.975], axis=0)
    right.plot(line, fitted.law.optimum(line)[0], color="0.2", linestyle="--", label="best N")
    right.fill_between(line, low, high, color="0.2", alpha=0.15, label="95 % interval")
    left.set(ylabel=metric)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    right.set(ylabel="parameters N", yscale="log")
    for axes in (left, right):
        axes.set(xlabel=f"compute C = {OPERATIONS} N D, operations", xscale="log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    save_figure(figure, path, dpi=110)


def _is_earlier(ablation: Ablation, row: Row) -> bool:
    """Whether a run had different settings from its arm's current ones."""
    return not set(train_command(ablation, row["arm"], ())) <= set(shlex.split(row["command"]))


def _differences(ablation: Ablation, rows: Sequence[Row]) -> list[str]:
    """Return a table of the differences to the first arm, or to the goal's, over seeds; nothing if no two arms have
    several."""
    values = {
        arm: [[row["evaluations"][-1]["metrics"].get(m) for m in ablation.metrics] for row in rows if row["arm"] == arm]
        for arm in ablation.arms
    }
    several = [arm for arm, runs in values.items() if len(runs) > 1]
    if len(several) < 2:
        return []
    first = ablation.curves[ablation.goal[0]][ablation.goal[1]] if ablation.goal else several[0]
    if first not in several:
        return []
    others = [arm for arm in several if arm != first]
    columns = [f"difference to {first}, over seeds", *ablation.metrics]
    lines = ["", "| " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(ablation.metrics)]
    for arm in others:
        cells = [arm]
        for one, other in zip(zip(*values[first]), zip(*values[arm])):
            value, low, high = (math.nan,) * 3 if None in (*one, *other) else difference_over_seeds(one, other)
            cells.append("–" if math.isnan(value) else f"{value:+.3f} ({low:+.3f} to {high:+.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, "", "In brackets are Welch's 95 % intervals; arms with one seed have none."]


def _mean_and_spread(values: Sequence[float | None]) -> str:
    if any(value is None for value in values):
        return "–"
    text = f"{statistics.mean(values):.3f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.3f}"


def plot(ablation: Ablation, rows: Sequence[Row], path: Path) -> None:
    """Draw the first metric: the mean over seeds, with their range shaded; or the points and their power law, with its
    95 % interval shaded."""
    if ablation.curves:
        curves, x = collect_last_values(ablation, rows), ablation.x_label
    else:
        # Runs of different numbers of epochs are compared at equal time.
        in_minutes = ablation.minutes or len({row["epochs"] for row in rows}) > 1
        x = "processor_minutes" if in_minutes else "epoch"
        curves = collect_values_over_training(ablation, rows, x)
    laws = power_laws(curves) if ablation.power_law else {}
    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        if not points:
            continue  # keeps its color until it is run
        style = dict(color=f"C{number % 10}", linestyle=("-", "--", ":")[number // 10])
        law = laws.get(name)
        if law is None or isinstance(law, str) or not law.falls:
            _draw_means(axes, points, label=name, **style)
        else:
            _draw_power_law(axes, points, law, label=name, **style)
    axes.set(xlabel=x.replace("_", " "), ylabel=ablation.metrics[0], title=path.stem)
    if ablation.power_law:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    goal = goal_of(ablation, curves)
    if goal is not None:
        axes.axhline(goal, color="0.5", linewidth=1, linestyle=":")
    if ablation.curves:
        ticks = sorted({x for points in curves.values() for x in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.minorticks_off()
    else:
        axes.set_xlim(left=0)
    if x == "epoch":
        axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    save_figure(figure, path, dpi=110)


def _draw_means(axes: Axes, points: Mapping[float, list[float]], *, label: str, color: str, linestyle: str) -> None:
    positions = list(points)
    means = [statistics.mean(values) for values in points.values()]
    axes.plot(positions, means, marker="o", markersize=3, label=label, color=color, linestyle=linestyle)
    lowest, highest = [min(values) for values in points.values()], [max(values) for values in points.values()]
    axes.fill_between(positions, lowest, highest, alpha=0.15, color=color)


def _draw_power_law(
    axes: Axes, points: Mapping[float, list[float]], law: PowerLaw, *, label: str, color: str, linestyle: str
) -> None:
    positions, values = flat(points)
    axes.plot(positions, values, marker="o", markersize=4, linestyle="none", color=color)
    line = np.geomspace(min(positions), max(positions))
    text = rf"{label}: {law.scale:.3g} $x^{{-{law.exponent:.2f} \pm {law.margin:.2f}}}$"
    axes.plot(line, law.at(line), label=text, color=color, linestyle=linestyle)
    axes.fill_between(line, *law.band(line), alpha=0.15, color=color)


def flat(points: Mapping[float, list[float]]) -> tuple[list[float], list[float]]:
    """Return the x and the y of a curve's points, one for each seed."""
    pairs = [(x, value) for x, values in points.items() for value in values]
    return [x for x, _ in pairs], [y for _, y in pairs]


def power_laws(curves: Curves) -> dict[str, PowerLaw | str]:
    """Return the power law of each curve, or why it has none."""
    laws: dict[str, PowerLaw | str] = {}
    for name, points in curves.items():
        try:
            laws[name] = fit_power_law(*flat(points))
        except ValueError as error:
            laws[name] = str(error)
    return laws


def collect_values_over_training(ablation: Ablation, rows: Sequence[Row], x: str) -> Curves:
    """Return a curve for each arm, with a point for each evaluation that all seeds have, counted from the last one; `x`
    is the mean over seeds."""
    metric, curves = ablation.metrics[0], {}
    for arm in ablation.arms:
        runs = [row["evaluations"] for row in rows if row["arm"] == arm]
        if runs:
            points = [*zip(*map(reversed, runs))][::-1]  # for each evaluation, the records of all seeds
            curves[arm] = {
                statistics.mean(record[x] for record in point): [_metric(record, metric) for record in point]
                for point in points
            }
    return curves


def collect_last_values(ablation: Ablation, rows: Sequence[Row]) -> Curves:
    """Return the set's `curves`, without the arms that have not been run."""
    metric, values = ablation.metrics[0], {}
    for row in rows:
        values.setdefault(row["arm"], []).append(_metric(row["evaluations"][-1], metric))
    return {
        name: {x: values[arm] for x, arm in points.items() if arm in values} for name, points in ablation.curves.items()
    }


def _metric(record: Mapping[str, Any], name: str) -> float:
    """Return a metric of an evaluation; nan, which is not drawn, if it was not measured."""
    value = record["metrics"].get(name)
    return math.nan if value is None else value
