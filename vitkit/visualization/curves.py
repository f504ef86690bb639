"""Loss and metric curves of a run, from its JSON-lines log."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitkit.errors import DataError

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


Curves = dict[str, tuple[np.ndarray, np.ndarray]]
"""Name -> epochs and values, both (K,), K > 0, finite."""


def _loss_curves(train: Sequence[dict[str, Any]], val: Sequence[dict[str, Any]]) -> Curves:
    points = {"total": [(record["epoch"], record.get("loss")) for record in train]}
    points["validation total"] = [(record["epoch"], record.get("metrics", {}).get("loss")) for record in val]
    # The terms of auxiliary layers follow the final layer's and would only crowd the picture.
    names = dict.fromkeys(name for record in train for name in record.get("losses", {}) if not name.startswith("aux"))
    for name in names:
        points[name] = [(record["epoch"], record.get("losses", {}).get(name)) for record in train]
    return _finite(points)


def _metric_curves(val: Sequence[dict[str, Any]], metrics: Sequence[str] | None) -> Curves:
    if metrics is None:
        known = dict.fromkeys(name for record in val for name in record.get("metrics", {}) if name != "loss")
        metrics = [name for name in known if name.rpartition("/")[2] in _HEADLINE] or list(known)
    points = {name: [(record["epoch"], record.get("metrics", {}).get(name)) for record in val] for name in metrics}
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


def _draw_curve(axes: Axes, epochs: np.ndarray, values: np.ndarray, name: str, color: str) -> None:
    style = "--" if name.startswith("validation") else "-"
    if len(values) < _FEW:
        axes.plot(epochs, values, style, marker="o", markersize=4, color=color, label=name)
    elif name.startswith("validation") or "/" in name:
        axes.plot(epochs, values, style, color=color, label=name)
    else:
        axes.plot(epochs, values, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(epochs, smooth(values, max(3, len(values) // 40)), color=color, label=name)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving average of (K,) values; near the ends over the values there are."""
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
