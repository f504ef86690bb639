"""Plots how far the heads of each layer attend."""

import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from vitkit.apps.visualization.canvas import save_figure


def plot_distances(models: Mapping[str, Mapping[str, np.ndarray]], path: str | Path, *, num_images: int) -> None:
    """Save a PNG of mean attention distances, a panel for each model: a dot for each head, layer by layer.

    Args:
        models: name -> layer -> (heads,) in pixels of the model's input.
        path: the PNG's path; its folder is made.
        num_images: the number of images that were averaged.
    """
    widest = max(len(layers) for layers in models.values())
    figure = Figure(figsize=(max(4.5, 0.42 * widest + 1.5) * len(models), 4.2), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, (name, layers) in zip(panels, models.items()):
        for i, heads in enumerate(layers.values()):
            panel.plot(np.full(len(heads), i), heads, "o", color="tab:blue", alpha=0.6, markersize=5)
        panel.plot([np.mean(heads) for heads in layers.values()], color="tab:orange", label="mean of the heads")
        panel.set_xticks(range(len(layers)), list(layers), rotation=90, fontsize="x-small")
        panel.set(title=textwrap.fill(name, 32), xlabel="layer")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set(ylabel="mean attention distance (pixels)", ylim=(0, 1.05 * panels[0].get_ylim()[1]))
    panels[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(f"A dot for each head; mean of {num_images} image{'s' if num_images > 1 else ''}", fontsize="small")
    save_figure(figure, path, dpi=120)
