"""Compares models on the same data, and the training curves of runs."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from vitkit.apps.inference import find_model, find_trained
from vitkit.apps.inference.inputs import unique_names
from vitkit.apps.report import comparison as pages
from vitkit.apps.training.api import test
from vitkit.apps.training.results import ScoredResults, score_file, score_run, score_with_config
from vitkit.apps.visualization.curves import (
    Line,
    draw_panels,
    line_colors,
    loss_curves,
    metric_curves,
    plot_training,
    read_log,
)
from vitkit.apps.visualization.metrics import draw_by_length
from vitkit.config import cfg_diff, reads_root, value_at
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.text import LengthGroup
from vitkit.logging import LOG_NAME
from vitkit.protocols.evaluator import LOWER_IS_BETTER
from vitkit.registry import nearest
from vitkit.weights.locate import RUN_CONFIG


def compare(
    *models: str | Path,
    names: Sequence[str] | None = None,
    data: str | Path | None = None,
    annotations: str | Path | None = None,
    images: str | Path | None = None,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    trust: bool = False,
) -> pages.Comparison:
    """Compare models on the same data, as `vitkit compare` does: differences of each metric, with intervals.

    `compare("runs/a", "runs/b").differences[0]["bbox/AP"].difference`

    Args:
        models: at least two. A run, whose best checkpoint is scored (RUN/results_val.json is used if it came from it,
            otherwise written); a checkpoint, an exported file or a name of the model zoo, scored on the data of its
            config; or a results file (.json) that `vitkit test` wrote.
        names: the models' names; None: those of their folders and files.
        data: score results files on the data of this config or run; None: on that of another kind of model among
            `models`, if there is one.
        annotations: score results files on these annotations in COCO's format.
        images: the folder of their images; None: none are shown.
        out: the HTML page to write; None: none.
        overrides: `key.sub=value` changes to the config of each model and of `data`, such as "data.root=data/coco",
            which models whose data lie elsewhere do without.
        device: such as "cuda" or "cpu"; None: the accelerator that PyTorch finds, otherwise the CPU.
        trust: let saved configs import the code that they name, see `load_config`.
    Raises:
        ConfigError: the models are fewer than two or of different tasks, or the data of a results file is unknown.
        DataError: the models were scored on different images, or a file is invalid.
    """
    scored = score_models(
        models, data=data, annotations=annotations, images=images, overrides=overrides, device=device, trust=trust
    )
    return compare_scored(scored, names=names, out=out)


def score_models(
    models: Sequence[str | Path],
    *,
    data: str | Path | None = None,
    annotations: str | Path | None = None,
    images: str | Path | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    trust: bool = False,
) -> list[ScoredResults]:
    """Score models on their data; see `compare`."""
    if len(models) < 2:
        raise ConfigError(f"got {len(models)} models; expected at least two to compare.")
    if data is None and annotations is None:
        data = next((model for model in models if not _is_results(model)), None)
    elif option := next((model for model in models if not _is_results(model)), None):
        raise ConfigError(
            f"{'--data' if data else '--annotations'}: {str(option)!r} is not a results file, and models are scored on "
            "the data of their own config. Give its results file instead (vitkit test MODEL --out FILE)."
        )
    if overrides and annotations is not None:
        raise ConfigError(f"{overrides[0]}: results files that are scored on --annotations have no config to change.")
    # All names are looked up before the first model runs: scoring takes long.
    scored_here = [model for model in models if not _is_results(model)]
    changes = {model: list(overrides) for model in scored_here}
    if any(text.startswith("data.root=") for text in overrides):
        without = [model for model in scored_here if not reads_root(find_model(model, trust=trust).config)]
        if len(without) < len(scored_here):  # the others' data may have moved
            changes |= {model: [o for o in overrides if not o.startswith("data.root=")] for model in without}
    others = [model for model in scored_here if not (Path(model) / RUN_CONFIG).is_file()]
    found = {model: find_trained(model, overrides=changes[model], trust=trust) for model in others}
    scored = []
    for model in models:
        path = Path(model)
        if _is_results(model) and data is not None and annotations is None:
            scored.append(score_with_config(path, str(data), overrides=overrides, trust=trust))
        elif _is_results(model):
            scored.append(score_file(path, annotations=annotations, images=images))
        elif (path / RUN_CONFIG).is_file():
            scored.append(score_run(path, overrides=changes[model], device=device, trust=trust))
        else:
            config, weights = found[model]
            evaluator = test(config, weights, device=device, trust=trust).evaluator
            scored.append(ScoredResults(path.stem, evaluator, config, None))
    return scored


def compare_scored(
    scored: Sequence[ScoredResults], *, names: Sequence[str] | None = None, out: str | Path | None = None
) -> pages.Comparison:
    """Compare scored models, and write the page if `out` is given; see `compare`."""
    names = unique_names(names or (each.name for each in scored))
    models = [pages.Compared(name, each.evaluator, each.config) for name, each in zip(names, scored)]
    if out is None:
        return pages.compare(models)
    logs = {name: each.folder / LOG_NAME for name, each in zip(names, scored) if each.folder is not None}
    curves = _curves_figure({name: log for name, log in logs.items() if log.is_file()})
    return pages.write_comparison(models, out, config_differences=config_differences(scored), curves=curves)


def config_differences(scored: Sequence[ScoredResults]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values differ between the first config and another one, with the value in each config."""
    configs = [each.config for each in scored]
    if any(config is None for config in configs):
        return []
    keys = dict.fromkeys(key for other in configs[1:] for key in cfg_diff(configs[0], other))
    return [(key, [str(value_at(config, key, "–")) for config in configs]) for key in keys]


def draw_lengths(
    scored: Sequence[ScoredResults], path: str | Path, *, names: Sequence[str] | None = None
) -> dict[str, list[LengthGroup]]:
    """Draw the metric of text models by source length, as Bahdanau et al. 2015 (figure 2), and return the groups.

    Raises:
        ConfigError: a model does not write text with references, or the models have different metrics.
    """
    groups = {}
    for name, each in zip(unique_names(names or (each.name for each in scored)), scored):
        try:
            groups[name] = each.evaluator.by_length()
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error}") from error
    metrics = {each.evaluator.per_class_metric for each in scored}
    if len(metrics) > 1:
        raise ConfigError(f"the models have different metrics: {', '.join(sorted(metrics))}. Score all by one.")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw_by_length(groups, path, metric=metrics.pop())
    return groups


def draw_curves(
    runs: Sequence[str | Path],
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    losses: Sequence[str] | None = None,
    smoothing: float | None = None,
    x: Literal["epoch", "step"] = "epoch",
) -> dict[str, dict[str, tuple[float, float]]]:
    """Draw the training curves of runs in one figure: losses, smoothed, and validation metrics.

    Args:
        runs: folders of runs, or their log.jsonl files. A single run is drawn with all terms of its loss, unless
            something else is chosen.
        path: the PNG to write.
        names: the names of the runs; None: the shortest ends of their folders' paths that differ.
        metrics, losses, smoothing, x: see `plot_runs`; None: AP, AP50 and AP75, or all metrics if a run has none of
            these, and the total loss.
    Returns:
        run -> metric -> its highest value, and the epoch or step at which it was reached; nothing for a single run
        with all terms.
    Raises:
        DataError: a log is missing, no run has a requested loss or metric, or names are repeated.
    """
    logs = [Path(run) / LOG_NAME if Path(run).is_dir() else Path(run) for run in runs]
    if len(logs) == 1 and names is metrics is losses is smoothing is None and x == "epoch":
        plot_training(logs[0], path)
        return {}
    names = _distinct_names(logs) if names is None else names
    if len(set(names)) < len(names):
        raise DataError(f"--names: {', '.join(names)} are not different.")
    return plot_runs(dict(zip(names, logs)), path, metrics=metrics, losses=losses or ["loss"], smoothing=smoothing, x=x)


def _is_results(model: str | Path) -> bool:
    return Path(model).suffix == ".json"


def _curves_figure(logs: Mapping[str, Path]) -> np.ndarray | None:
    """Return the training curves of runs in one figure, (H, W, 3) uint8 RGB; None for fewer than two runs."""
    if len(logs) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        figure = Path(folder) / "curves.png"
        plot_runs(logs, figure)
        return np.asarray(Image.open(figure).convert("RGB"))


def _distinct_names(logs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the logs' folder paths that are all different."""
    folders = [path.resolve().parent.parts for path in logs]
    for depth in range(1, max(map(len, folders)) + 1):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in logs]


def plot_runs(
    logs: Mapping[str, str | Path],
    out_path: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    losses: Sequence[str] = ("loss",),
    smoothing: float | None = None,
    x: Literal["epoch", "step"] = "epoch",
) -> dict[str, dict[str, tuple[float, float]]]:
    """Save a PNG that compares runs: a panel for each loss and each validation metric, a color for each run.

    Args:
        logs: the name of a run in the figure -> its log; see `plot_training`.
        out_path: the PNG's path; its folder is made.
        metrics: the validation metrics to draw; None: AP, AP50 and AP75, or all metrics if a run has none of these.
        losses: the losses to draw: "loss" is the total, with the validation total dashed; other names are its terms.
        smoothing: the fraction of a loss curve over which it is averaged, 0 for none; None: a fortieth.
        x: the unit of the x axis.
    Returns:
        run -> metric -> its highest value, and the epoch or step at which it was reached.
    Raises:
        DataError: a log is missing or empty, no run has a requested loss or metric, or there is nothing to draw.
    """
    records = {name: read_log(path) for name, path in logs.items()}
    headline = dict.fromkeys(name for _, val in records.values() for name in metric_curves(val, None, x))
    terms = dict.fromkeys(name for train, val in records.values() for name in loss_curves(train, val, x))
    metrics = list(headline) if metrics is None else list(metrics)
    panels: dict[str, list[Line]] = {}
    best: dict[str, dict[str, tuple[float, float]]] = {run: {} for run in records}
    for title in (*losses, *metrics):
        names = ["total", "validation total"] if title == "loss" else [title]
        lines = []
        for color, (run, (train, val)) in zip(line_colors(len(records)), records.items()):
            curves = loss_curves(train, val, x) | metric_curves(val, metrics, x)
            for name in names:
                if name in curves:
                    label = f"{run}, validation" if name.startswith("validation") else run
                    lines.append(Line(label, color, name, *curves[name]))
                if name in metrics and name in curves:
                    positions, values = curves[name]
                    k = values.argmin() if name in LOWER_IS_BETTER else values.argmax()
                    best[run][name] = float(values[k]), float(positions[k])
        if lines:
            panels[title] = lines
        elif title != "loss" or not headline:
            everything = {name for _, val in records.values() for r in val for name in r.get("metrics", {})}
            raise DataError(f"no run has a {title!r}. {nearest(title, {*everything, *terms} - {'total'})}")
    draw_panels(panels, out_path, smoothing, x)
    return best
