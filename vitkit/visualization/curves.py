"""Loss and metric curves of runs, from their JSON-lines logs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitkit.errors import DataError
from vitkit.registry import nearest

_HEADLINE = ("AP", "AP50", "AP75")
_FEW = 10  # below this many points a curve shows each of them and is not smoothed


def read_log(log_path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The train and the validation records of a log, by step.

    A line that a stopped run left unfinished is passed over. Where a resumed run repeats a step, its record counts.

    Raises:
        DataError: no such file, or no record in it.
    """
    path = Path(log_path)
    if not path.is_file():
        raise DataError(f"no log {str(path)!r}: give the JSON-lines file that training writes into the run's folder.")
    records: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "val": {}}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            records[record["kind"]][record["step"]] = record
        except (ValueError, KeyError, TypeError):
            continue
    train, val = ([by_step[step] for step in sorted(by_step)] for by_step in records.values())
    if not train and not val:
        raise DataError(f"{str(path)!r} holds no train or val record: expected one JSON object with 'kind' per line.")
    return train, val


def plot_training(log_path: str | Path, out_path: str | Path, *, metrics: Sequence[str] | None = None) -> None:
    """Saves a PNG with the losses and the validation metrics of a run over its epochs.

    Args:
        log_path: JSON lines `{"kind": "train", "step", "epoch", "loss", "losses": {...}}` and
            `{"kind": "val", "step", "epoch", "metrics": {...}}`.
        out_path: of the PNG; its folder is made.
        metrics: which validation metrics to draw; by default AP, AP50 and AP75, or all where there is none of these.
    Raises:
        DataError: the log is missing or empty.
    """
    train, val = read_log(log_path)
    losses = _loss_curves(train, val)
    scores = _metric_curves(val, metrics)
    panels = [(losses, "loss"), (scores, "validation")]
    panels = [(curves, title) for curves, title in panels if curves]
    figure = Figure(figsize=(6.4 * max(1, len(panels)), 4.4), layout="constrained")
    for k, (curves, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), k)
        for number, (name, (epochs, values)) in enumerate(curves.items()):
            _draw_curve(axes, epochs, values, name, f"C{number}")
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right" if title == "loss" else "lower right")
        axes.spines[["top", "right"]].set_visible(False)
        if title == "loss":
            axes.set_ylim(bottom=0)
        else:
            top = max(values.max() for _, values in curves.values())
            axes.set_ylim(0, 1 if 0.3 < top <= 1 else None)
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_path, dpi=120, format="png")


def plot_runs(
    logs: Mapping[str, str | Path],
    out_path: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    losses: Sequence[str] = ("loss",),
    smoothing: float | None = None,
    x: Literal["epoch", "step"] = "epoch",
) -> dict[str, dict[str, tuple[float, float]]]:
    """Saves a PNG that compares runs: a panel for each loss and each validation metric, a colour for each run.

    Args:
        logs: what a run is called in the picture -> its log; see `plot_training`.
        out_path: of the PNG; its folder is made.
        metrics: which validation metrics to draw; by default AP, AP50 and AP75, or all where there is none of these.
        losses: which losses: "loss" is the total, beside it the validation total is drawn in dashes; or any term.
        smoothing: the part of a curve of losses over which it is averaged, 0 for none; None: a fortieth.
        x: over what.
    Returns:
        run -> metric -> its highest value, and where it was.
    Raises:
        DataError: a log is missing or empty, no run has a loss or metric that is asked for, or none has anything.
    """
    records = {name: read_log(path) for name, path in logs.items()}
    known = dict.fromkeys(name for _, val in records.values() for name in _metric_curves(val, None, x))
    terms = dict.fromkeys(name for train, val in records.values() for name in _loss_curves(train, val, x))
    wanted = list(known) if metrics is None else list(metrics)
    panels: dict[str, dict[str, Curves]] = {}
    for title, names in [*((loss, _loss_names(loss)) for loss in losses), *((metric, [metric]) for metric in wanted)]:
        curves = {}
        for run, (train, val) in records.items():
            found = _loss_curves(train, val, x) | _metric_curves(val, wanted, x)
            curves[run] = {name: found[name] for name in names if name in found}
        if any(curves.values()):
            panels[title] = curves
        elif title != "loss" or not known:
            everything = dict.fromkeys(
                name for _, val in records.values() for r in val for name in r.get("metrics", {})
            )
            raise DataError(f"no run has a {title!r}. {nearest(title, {*everything, *terms} - {'total'})}")
    _draw_panels(panels, out_path, smoothing, x)
    best: dict[str, dict[str, tuple[float, float]]] = {run: {} for run in records}
    for metric in wanted:
        for run, curves in panels.get(metric, {}).items():
            for places, values in curves.values():
                best[run][metric] = float(values.max()), float(places[values.argmax()])
    return best


def _loss_names(loss: str) -> list[str]:
    return ["total", "validation total"] if loss == "loss" else [loss]


def _draw_panels(
    panels: Mapping[str, Mapping[str, "Curves"]], out_path: str | Path, smoothing: float | None, x: str
) -> None:
    across = 2 if len(panels) == 4 else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(6.4 * across, 4.4 * down), layout="constrained")
    for k, (title, of_run) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(down, across, k)
        for number, (run, curves) in enumerate(of_run.items()):
            for name, (places, values) in curves.items():
                label = f"{run}, validation" if name.startswith("validation") else run
                _draw_curve(axes, places, values, name, f"C{number}", label=label, smoothing=smoothing)
        axes.set(title=title, xlabel=x)
        if all((values >= 0).all() for curves in of_run.values() for _, values in curves.values()):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_path, dpi=120, format="png")


Curves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name -> epochs (or steps) and values, both (K,), K > 0, finite."""


def _loss_curves(train: Sequence[dict[str, Any]], val: Sequence[dict[str, Any]], x: str = "epoch") -> Curves:
    points = {"total": [(record[x], record.get("loss")) for record in train]}
    points["validation total"] = [(record[x], record.get("metrics", {}).get("loss")) for record in val]
    # The terms of auxiliary layers follow the final layer's and would only crowd the picture.
    names = dict.fromkeys(name for record in train for name in record.get("losses", {}) if not name.startswith("aux"))
    for name in names:
        points[name] = [(record[x], record.get("losses", {}).get(name)) for record in train]
    return _finite(points)


def _metric_curves(val: Sequence[dict[str, Any]], metrics: Sequence[str] | None, x: str = "epoch") -> Curves:
    if metrics is None:
        known = dict.fromkeys(name for record in val for name in record.get("metrics", {}) if name != "loss")
        metrics = [name for name in known if name.rpartition("/")[2] in _HEADLINE] or list(known)
    points = {name: [(record[x], record.get("metrics", {}).get(name)) for record in val] for name in metrics}
    # COCO reports -1 where there is nothing to find.
    return _finite({name: [(e, v) for e, v in pairs if v is None or v >= 0] for name, pairs in points.items()})


def _finite(points: dict[str, list[tuple[float, float | None]]]) -> Curves:
    curves = {}
    for name, pairs in points.items():
        kept = [(epoch, value) for epoch, value in pairs if value is not None and math.isfinite(value)]
        if kept:
            epochs, values = np.array(kept, np.float64).T
            curves[name] = epochs, values
    return curves


def _draw_curve(
    axes: Axes,
    epochs: np.ndarray,
    values: np.ndarray,
    name: str,
    color: str,
    *,
    label: str | None = None,
    smoothing: float | None = None,
) -> None:
    style, label = "--" if name.startswith("validation") else "-", label or name
    window = max(3, len(values) // 40) if smoothing is None else max(1, round(smoothing * len(values)))
    if len(values) < _FEW:
        axes.plot(epochs, values, style, marker="o", markersize=4, color=color, label=label)
    elif name.startswith("validation") or "/" in name or window == 1:
        axes.plot(epochs, values, style, color=color, label=label)
    else:
        axes.plot(epochs, values, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(epochs, smooth(values, window), color=color, label=label)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of (K,) values; near the ends over the values there are."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
