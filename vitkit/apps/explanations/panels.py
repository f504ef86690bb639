"""Figures of many small images in rows: an attention map for each layer, head or query."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from vitkit.apps.explanations.drawing import mark_point, overlay_attention
from vitkit.apps.visualization.canvas import class_color, save_figure, scale_image

SIDE = 224
"""The length of the long side of a panel's image in pixels."""
_INCH = 1.5


class Panel(NamedTuple):
    """A small image and what is drawn on it. Positions are in pixels of the image."""

    title: str = ""
    weights: Tensor | None = None
    """(h, w) attention weights, overlaid on the gray image; None: the image itself is shown."""
    covered: tuple[float, float] = (1.0, 1.0)
    """Height and width of the region that `weights` cover, see `overlay_attention`."""
    largest: float | None = None
    """The weight that is drawn in full color; None: the map's largest."""
    points: Sequence[tuple[float, float]] = ()
    """(x, y) of points that are drawn as numbered dots."""
    first_point: int = 0
    """Index of the first point, from 0; its dot shows this number plus 1."""
    boxes_xyxy: Sequence[Sequence[float]] = ()
    outline: np.ndarray | None = None
    """(H', W') bool mask over the image, at any resolution, whose outline is drawn."""
    dashed: Sequence[np.ndarray] = ()
    """Masks like `outline`, whose outlines are dashed."""
    arrows: Sequence[tuple[tuple[float, float], tuple[float, float], float]] = ()
    """For each arrow its start, its end, and its strength in 0..1."""
    dots: Tensor | None = None
    """(N, 2) xy of small dots."""
    dot_colors: Sequence[str] | str = "#00c8ff"
    image: np.ndarray | None = None
    """Replaces the image: (H', W', 3) uint8 RGB over the same area, or (h, w) float, drawn on its own scale and gray
    where it is nan."""


def draw_rows(
    image: np.ndarray,
    rows: Sequence[tuple[str, Sequence[Panel | None]]],
    path: str | Path,
    *,
    title: str = "",
    panel: float = _INCH,
    legend: Sequence[tuple[str, tuple[int, int, int]]] = (),
) -> None:
    """Save a PNG of rows of panels.

    Args:
        image: (H, W, 3) uint8 RGB, the background of all panels.
        rows: the name and the panels of each row, at least one; None: an empty panel.
        path: the PNG's path; its folder is made.
        title: the figure's title.
        panel: width of a panel in inches.
        legend: texts and their RGB colors in 0..255.
    """
    canvas, scale = scale_image(image, SIDE if panel < 2 else 2 * SIDE)
    columns = max(len(panels) for _, panels in rows)
    height = panel * canvas.shape[0] / canvas.shape[1]
    has_titles = any(part and part.title for _, panels in rows[1:] for part in panels)
    size = (panel * columns + 0.6, (height + (0.3 if has_titles else 0.1)) * len(rows) + 0.6 + 0.2 * len(legend))
    figure = Figure(figsize=(max(size[0], 4.2), size[1]), layout="constrained")
    letters = int(max(size[0], 4.2) * 11)
    figure.suptitle(textwrap.fill(title, letters), fontsize="medium")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, panels) in zip(axes, rows):
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(textwrap.fill(name, int(height * 11)), fontsize="x-small")
        for axis, part in zip(line, panels):
            if part is None:
                continue
            axis.set_title(textwrap.fill(part.title, int(panel * 15)), fontsize="x-small", pad=2)
            _draw(axis, part, canvas, scale)
    if legend:
        handles = [Patch(color=tuple(part / 255 for part in color), label=text) for text, color in legend]
        figure.legend(handles=handles, loc="outside lower center", fontsize="x-small", frameon=False)
    save_figure(figure, path, dpi=120)


def _draw(axis: Axes, part: Panel, canvas: np.ndarray, scale: float) -> None:
    height, width = canvas.shape[:2]
    image = part.image
    if image is not None and image.ndim == 2:
        colors = colormaps["inferno"].with_extremes(bad="0.8")
        axis.imshow(image, cmap=colors, vmin=0)
        return
    if image is None:
        image = canvas
        if part.weights is not None:
            image = overlay_attention(canvas, part.weights, covered=part.covered, largest=part.largest)
    axis.imshow(image, extent=(0, width, height, 0), interpolation="nearest")
    outlines = [] if part.outline is None else [(part.outline, dict(colors="#00ff9c", linewidths=1.0))]
    outlines += [(mask, dict(colors="white", linewidths=1.5, linestyles="--")) for mask in part.dashed]
    for mask, style in outlines:
        if mask.any() and not mask.all():
            # Padding moves the contour half a pixel outwards, to the edge of the mask's pixels.
            padded = np.pad(mask.astype(float), 1)
            ys, xs = ((np.arange(n) - 0.5) / (n - 2) * side for n, side in zip(padded.shape, (height, width)))
            axis.contour(xs, ys, padded, levels=[0.5], **style)
    for x0, y0, x1, y1 in part.boxes_xyxy:
        corner, sides = (x0 * scale, y0 * scale), ((x1 - x0) * scale, (y1 - y0) * scale)
        axis.add_patch(Rectangle(corner, *sides, fill=False, color="#00ff9c", linewidth=1.2))
    for start, end, strength in part.arrows:
        ends = dict(xy=(end[0] * scale, end[1] * scale), xytext=(start[0] * scale, start[1] * scale))
        style = dict(arrowstyle="->", color="#ffe000", alpha=0.25 + 0.75 * strength, linewidth=0.6 + 1.4 * strength)
        axis.annotate("", **ends, arrowprops=style)
    if part.dots is not None and len(part.dots):
        size = min(3.0, 3000 / len(part.dots))  # many points would hide the image
        axis.scatter(*(part.dots * scale).T.numpy(), s=size, c=part.dot_colors, linewidths=0)
    for number, (x, y) in enumerate(part.points, start=part.first_point + 1):
        if part.weights is None:
            mark_point(axis, (x * scale, y * scale), number)
        else:
            color = np.array(class_color(number - 1)) / 255
            axis.plot(x * scale, y * scale, "o", markersize=5, color=color, markeredgecolor="white")
    axis.set(xlim=(0, width), ylim=(height, 0))
