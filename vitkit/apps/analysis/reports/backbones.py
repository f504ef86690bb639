"""Costs of all backbones beside their published figures, and of clip backbones by frames and crop size."""

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vitkit.apps.analysis.clips import CLIPS, clip_cost
from vitkit.apps.analysis.macs import count_macs
from vitkit.apps.analysis.memory import count_parameters
from vitkit.apps.analysis.reports.cost_plots import Accuracy, plot_accuracy, plot_costs
from vitkit.apps.analysis.reports.published import read_published, zoo_entry
from vitkit.apps.analysis.reports.subject import build_backbone
from vitkit.errors import ConfigError
from vitkit.registry import BACKBONES, nearest

GIB = 2**30


def variants(pattern: str = "*") -> list[str]:
    """Return the registered variants, names other than those of classes, that match a pattern.

    Raises:
        ConfigError: no variant matches.
    """
    every = [name for name in BACKBONES.names() if BACKBONES.resolve(name)[0].__name__ != name]
    names = fnmatch.filter(every, pattern)
    if not names:
        raise ConfigError(f"no backbone matches {pattern!r}. {nearest(pattern, every)}")
    return names


def count_variant(name: str, *, macs: bool = True) -> dict[str, Any]:
    """Count a backbone's parameters and its MACs on the input of its published figures."""
    model = build_backbone(name, device="cpu" if macs else "meta")
    figures = read_published().get(name, {})
    shape = figures.get("input", [3, 224, 224])
    counted = count_macs(model, torch.zeros(1, *shape)) if macs else None
    return {
        "backbone": name,
        "input": shape,
        "parameters": count_parameters(model)[""].total,
        "macs": counted and counted.total,
        "unknown": counted.unknown if counted else {},
        "published": figures,
        "top1": zoo_entry(name).get("published", {}).get("top-1"),
    }


def clip_costs(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the costs of clip backbones by the number of frames and the crop size; see `clip_cost`."""
    for name in names:
        for change, sizes in CLIPS.items():
            for frames, crop in sizes:
                cost = asdict(clip_cost(name, frames, crop))
                yield {"model": name, "against": change, "frames": frames, "crop": crop, **cost}


def plot_clip_costs(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Plot the rows of `clip_costs` into a PNG."""
    names = dict.fromkeys(row["model"] for row in rows)
    panels = []
    for title, key, unit in (
        ("GMACs", "macs", 1e9),
        ("saved in training, GiB", "saved_bytes", GIB),
        ("attention matrices, GiB", "attention_bytes", GIB),
    ):
        for change in CLIPS:
            curves = {}
            for name in names:
                own = [row for row in rows if (row["model"], row["against"]) == (name, change)]
                curves[name] = [row[change] for row in own], [row[key] / unit for row in own]
            panels.append((change, title, curves))
    plot_costs(panels, path)


def plot_published_accuracy(names: Sequence[str], path: str | Path) -> None:
    """Plot the published top-1 of the ImageNet-1k classifiers among some backbones against their published MACs.

    Raises:
        ConfigError: none of them has both.
    """
    sizes = r"(?<=_)(tiny|small|base|large|huge)(?=_|$)|(?<=resnet)\d+"
    classifiers = []
    for name in names:
        entry, macs, size = zoo_entry(name), read_published().get(name, {}).get("published_g"), re.search(sizes, name)
        if entry.get("dataset") == "ImageNet-1k" and macs and size:
            family, label = re.sub(sizes, "*", name), size[0] if size[0].isdigit() else size[0][0].upper()
            pretraining = "ImageNet-22k" if "22k" in entry["url"] else ""
            classifiers.append(Accuracy(family, label, 1e9 * macs, entry["published"]["top-1"], pretraining))
    if not classifiers:
        raise ConfigError("--plot: none of these backbones has a published top-1 on ImageNet-1k and published MACs.")
    plot_accuracy(classifiers, path)
