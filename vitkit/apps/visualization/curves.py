"""Loss and metric curves of runs, from their JSON-lines logs."""

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitkit.apps.visualization.canvas import save_figure
from vitkit.errors import DataError
from vitkit.protocols.evaluator import is_measured

_HEADLINE = ("AP", "AP50", "AP75")
_DETAIL = re.compile(r"AP[sml]|AR(\d+|[sml])|(train_)?matched_accuracy|[PRS]Q.*|\w*(IoU|accuracy).*")
"""Metrics that are not drawn beside `_HEADLINE`; those that a user's evaluator adds are."""
_FEW = 10  # a curve with fewer points shows each of them and is not smoothed


def read_log(log_path: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the train and the validation records of a log, by step.

    A line that an interrupted run left unfinished is skipped. If a resumed run repeats a step, the last record is kept.

    Raises:
        DataError: there is no such file, it has no record, or a record is not of a run.
    """
    path = Path(log_path)
    if not path.is_file():
        raise DataError(f"no log {str(path)!r}: give the JSON-lines file that training writes into the run's folder.")
    records: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "val": {}}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.get("kind") in ("train", "val"):
            if wrong := _wrong_field(record):
                raise DataError(
                    f"'{path}' line {number}: {wrong} is {reprlib.repr(record.get(wrong))}; expected the record of a "
                    "run, with numbers. Give the log that training wrote."
                )
            records[record["kind"]][record["step"]] = record
    train, val = ([by_step[step] for step in sorted(by_step)] for by_step in records.values())
    if not train and not val:
        raise DataError(f"{str(path)!r} has no train or val record: expected one JSON object with 'kind' per line.")
    return train, val


def _wrong_field(record: Mapping[str, Any]) -> str | None:
    """Return the first field of a record that is not as training writes it; None if all are."""
    if type(record.get("step")) is not int or not 0 <= record["step"] < 2**63:
        return "step"
    if not is_number(record.get("epoch")) or not math.isfinite(record["epoch"]):
        return "epoch"
    if not is_number(record.get("loss", 0)):
        return "loss"
    for field in ("losses", "metrics"):
        values = record.get(field, {})
        if not isinstance(values, dict) or not all(value is None or is_number(value) for value in values.values()):
            return field
    return None


def is_number(value: Any) -> bool:
    """Whether a value is a number that fits a float; a diverged run logs nan and infinity."""
    return type(value) is float or (type(value) is int and abs(value) < 2**63)


def plot_training(log_path: str | Path, out_path: str | Path) -> None:
    """Save a PNG of a run over its epochs: total loss, its terms, validation metrics (AP, AP50, AP75 if any, or all).

    Args:
        log_path: JSON lines `{"kind": "train", "step", "epoch", "loss", "losses": {...}}` and
            `{"kind": "val", "step", "epoch", "metrics": {...}}`.
        out_path: the PNG's path; its folder is made.
    Raises:
        DataError: the log is missing or empty.
    """
    train, val = read_log(log_path)
    losses = loss_curves(train, val)
    # The total also includes the terms of auxiliary layers; on its axis the single terms would lie flat at the bottom.
    total = {name: losses.pop(name) for name in ("total", "validation total") if name in losses}
    panels = {"loss": total, "terms of the loss": losses if len(losses) > 1 else {}, "validation": metric_curves(val)}
    lines = {
        title: [Line(name, color, name, *curves[name]) for name, color in zip(curves, line_colors(len(curves)))]
        for title, curves in panels.items()
        if curves
    }
    draw_panels(lines, out_path)


def line_colors(count: int) -> list[Any]:
    """Return a different color for each of `count` curves."""
    if count <= 10:
        return [f"C{number}" for number in range(count)]
    return [colormaps["turbo"](0.05 + 0.9 * number / (count - 1)) for number in range(count)]


class Line(NamedTuple):
    """A curve to draw."""

    label: str
    color: Any
    name: str
    """The name of the loss or metric."""
    positions: np.ndarray
    """(K,) epochs or steps."""
    values: np.ndarray
    """(K,) the loss or metric at each position."""


def draw_panels(
    panels: Mapping[str, Sequence[Line]], out_path: str | Path, smoothing: float | None = None, x: str = "epoch"
) -> None:
    across = 2 if len(panels) == 4 else max(1, min(3, len(panels)))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(7.6 * across, 4.4 * max(1, down)), layout="constrained")
    for k, (title, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(down, across, k)
        for line in lines:
            _draw_curve(axes, line, smoothing)
        axes.set(title=title, xlabel=x)
        if all((line.values >= 0).all() for line in lines):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out_path, dpi=120)


Curves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name -> epochs (or steps) and values, both (K,), K > 0, finite."""


def loss_curves(train: Sequence[dict[str, Any]], val: Sequence[dict[str, Any]], x: str = "epoch") -> Curves:
    points = {"total": [(record[x], record.get("loss")) for record in train]}
    points["validation total"] = [(record[x], record.get("metrics", {}).get("loss")) for record in val]
    # The terms of auxiliary layers resemble the final layer's and would only crowd the figure.
    names = dict.fromkeys(name for record in train for name in record.get("losses", {}) if not name.startswith("aux"))
    for name in names:
        points[name] = [(record[x], record.get("losses", {}).get(name)) for record in train]
    return _finite(points)


def metric_curves(val: Sequence[dict[str, Any]], metrics: Sequence[str] | None = None, x: str = "epoch") -> Curves:
    if metrics is None:
        names = dict.fromkeys(name for record in val for name in record.get("metrics", {}) if name != "loss")
        metrics = list(names)
        if any(name.rpartition("/")[2] in _HEADLINE for name in names):
            metrics = [name for name in names if not _DETAIL.fullmatch(name.rpartition("/")[2])]
    points = {name: [(record[x], record.get("metrics", {}).get(name)) for record in val] for name in metrics}
    return _finite({name: [(e, v) for e, v in pairs if is_measured(v)] for name, pairs in points.items()})


def _finite(points: dict[str, list[tuple[float, float | None]]]) -> Curves:
    curves = {}
    for name, pairs in points.items():
        finite = [(epoch, value) for epoch, value in pairs if value is not None and math.isfinite(value)]
        if finite:
            epochs, values = np.array(finite, np.float64).T
            curves[name] = epochs, values
    return curves


def _draw_curve(axes: Axes, line: Line, smoothing: float | None) -> None:
    _, color, name, positions, values = line
    style = "--" if name.startswith("validation") else "-"
    window = max(3, len(values) // 40) if smoothing is None else max(1, round(smoothing * len(values)))
    if len(values) < _FEW:
        axes.plot(positions, values, style, marker="o", markersize=4, color=color, label=line.label)
    elif name.startswith("validation") or "/" in name or window == 1:
        axes.plot(positions, values, style, color=color, label=line.label)
    else:
        axes.plot(positions, values, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(positions, smooth(values, window), color=color, label=line.label)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centered moving average of (K,) values, over fewer values near the ends."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
