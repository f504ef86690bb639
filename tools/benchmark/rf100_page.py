"""The table and the plot of rf100.py: AP against minutes, of several models on the same datasets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, ScalarFormatter

from vitkit.apps.visualization.canvas import save_figure
from vitkit.text_format import pluralize

Record = dict[str, Any]
"""A model's figures on a dataset, as rf100.py writes them; of each metric the value and the ends of its interval."""
METRICS = ("AP", "AP50")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
"""What colorblind readers can tell apart (Okabe and Ito)."""


def summarize(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each model's means over the datasets that all models have a record of.

    The interval of a mean is over the images of these datasets, whose deviations are independent; it says nothing about
    other datasets.
    """
    models = list(dict.fromkeys(record["model"] for record in records))
    of_model = {model: {r["dataset"]: r for r in records if r["model"] == model} for model in models}
    shared = set.intersection(*(set(by_name) for by_name in of_model.values()))
    summaries = []
    for model, by_name in of_model.items():
        chosen = [by_name[name] for name in by_name if name in shared]
        summary = dict(model=model, size=next(iter(by_name.values()))["size"], datasets=len(chosen), all=len(by_name))
        if chosen:
            summary |= {metric: mean_with_interval([r[metric] for r in chosen]) for metric in METRICS}
            summary |= {key: float(np.mean([r[key] for r in chosen])) for key in ("minutes", "processor_minutes")}
        summaries.append(summary)
    return summaries


def mean_with_interval(values: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of independent figures, (value, low, high) each, and the ends of its interval."""
    figures, low, high = np.array(values, np.float64).T
    mean, count = figures.mean(), len(figures)
    below, above = (float(np.sqrt(((figures - end) ** 2).sum()) / count) for end in (low, high))
    return [float(mean), float(mean) - below, float(mean) + above]


def table(
    protocol: Mapping[str, Any],
    summaries: Sequence[Mapping[str, Any]],
    records: Sequence[Record],
    num_datasets: int,
    failures: Mapping[str, str],
) -> str:
    """Return the page: the models side by side, then every dataset."""
    by_protocol = ", ".join(f"{key} {value}" for key, value in protocol.items())
    lines = [
        "# Detectors on many datasets", "", f"Protocol: {by_protocol}.",
        "Intervals of 95 % are over the test images, of a mean over those of its datasets. Minutes are those of a run:",
        "training and evaluation on valid.", "",
        "| model | images | datasets | AP | AP50 | minutes | processor minutes |", "|---|---|---:|---|---|---:|---:|",
    ]  # fmt: skip
    for summary in summaries:
        cells = [summary["model"], summary["size"], f"{summary['datasets']} of {num_datasets}"]
        if summary["datasets"]:
            cells += [*(figure(summary[metric]) for metric in METRICS)]
            cells += [f"{summary[key]:.1f}" for key in ("minutes", "processor_minutes")]
        else:
            cells += ["–"] * 4
        lines.append(f"| {' | '.join(cells)} |")
    if any(summary["datasets"] < summary["all"] for summary in summaries):
        lines += ["", "The means are over the datasets that every model has a record of."]
    lines += ["", "| dataset | train / valid / test | classes | model | AP | AP50 | AP on valid | steps | minutes |"]
    lines.append("|---|---|---:|---|---|---|---:|---:|---:|")
    for record in records:
        cells = [record["dataset"], " / ".join(map(str, record["images"].values())), str(record["classes"])]
        cells += [record["model"], *(figure(record[metric]) for metric in METRICS), f"{record['valid_AP']:.3f}"]
        cells += [str(record["steps"]), f"{record['minutes']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    if failures:
        lines += ["", f"{pluralize(len(failures), 'failures')}:", ""]
        lines += [f"- {what}: {message}" for what, message in failures.items()]
    machines = sorted({f"{r['device']}, {r['threads']} thread(s), torch {r['versions']['torch']}" for r in records})
    return "\n".join([*lines, "", f"{'; '.join(machines)}. The commands and checksums are in rf100.json.", ""])


def figure(values: Sequence[float]) -> str:
    """Return a figure with its interval: "0.512 (0.480 to 0.541)"."""
    return "{:.3f} ({:.3f} to {:.3f})".format(*values)


def plot_records(summaries: Sequence[Mapping[str, Any]], records: Sequence[Record], out_path: Path) -> None:
    """Save a PNG of AP against the minutes of a run: a large point with its interval for each model's means, a small
    one for each of its datasets."""
    image = Figure(figsize=(8.4, 5.2), layout="constrained")
    axes = image.subplots()
    for number, summary in enumerate(summaries):
        color = COLORS[number % len(COLORS)]
        of_model = [record for record in records if record["model"] == summary["model"]]
        points = [(record["minutes"], record["AP"][0]) for record in of_model]
        axes.plot(*zip(*points), "o", color=color, alpha=0.5, markersize=5, markeredgewidth=0)
        label = f"{summary['model']} ({pluralize(summary['all'], 'datasets')})"
        if summary["datasets"]:
            value, low, high = summary["AP"]
            label = f"{summary['model']}: {value:.3f}, {summary['minutes']:.1f} min"
            ends = [[value - low], [high - value]]
            axes.errorbar(summary["minutes"], value, ends, color=color, capsize=3, linewidth=1.2)
        where = (summary["minutes"], summary["AP"][0]) if summary["datasets"] else (np.nan, np.nan)
        axes.plot(*where, "D", color=color, markersize=9, markeredgecolor="white", label=label)
    axes.set(xscale="log", xlabel="minutes of a run", ylabel="AP on test", ylim=(0, None))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "large: mean over the datasets that all models have, with its interval; small: a dataset", fontsize=8
    )
    image.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8)
    save_figure(image, out_path, dpi=110)
