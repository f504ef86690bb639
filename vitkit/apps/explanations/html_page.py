"""Write one self-contained HTML file that shows attention under the pointer: of a pixel, a query, a token or a head."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.apps.report.html import jpeg_url, render_page
from vitkit.apps.visualization.canvas import scale_image
from vitkit.errors import ConfigError
from vitkit.io.output import write_bytes

MAX_BYTES = 3_200_000
"""The limit for all weights together in bytes; with base64 and the image, the file stays below 5 MB."""

_TEMPLATE = Path(__file__).parent / "attention.html"

Grid = tuple[int, int]
Labels = Sequence[str]


@dataclass
class PageLayer:
    """The attention of one layer from rows to columns, each of them locations of the image, queries or tokens."""

    name: str
    weights: Tensor
    """(heads, N, M) attention weights, at least 0; the page also shows the mean of the heads."""
    rows: Grid | Labels
    """(height, width) of a grid of N locations, row by row; or N labels."""
    columns: Grid | Labels
    """(height, width) of a grid of M locations, row by row; or M labels."""
    covered: tuple[float, float] = (1.0, 1.0)
    """Height and width of the region that grids of locations cover, relative to those of the image."""
    boxes_xyxy: Sequence[Sequence[float]] = field(default_factory=list)
    """The boxes of labeled rows, in pixels of the image; may be empty."""


def write_explain_page(
    layers: Sequence[PageLayer], path: str | Path, *, title: str, image: np.ndarray | None = None
) -> int:
    """Write the page. If there are too many weights, only the last layers keep single heads, and the page says so.

    Args:
        layers: at least one; those with locations need an image.
        path: the HTML file's path; its folder is made.
        title: the page's title.
        image: (H, W, 3) uint8 RGB.
    Returns:
        the number of bytes written.
    Raises:
        ConfigError: there are too many weights even without single heads.
    """
    means = [layer.weights.float().mean(0, keepdim=True) for layer in layers]
    left = MAX_BYTES - sum(mean.numel() for mean in means)
    if left < 0:
        raise ConfigError(
            f"html: {MAX_BYTES - left} weights, only of the mean of the heads, are too many for a page; expected "
            f"at most {MAX_BYTES}. Give a shorter text or clip, or leave html out."
        )
    parts: list[dict[str, Any]] = []
    for layer, mean in zip(reversed(layers), reversed(means)):
        heads, weights = ["mean"], mean
        if len(layer.weights) > 1 and layer.weights.numel() <= left:
            left -= layer.weights.numel()
            heads += [f"head {k}" for k in range(len(layer.weights))]
            weights = torch.cat((mean, layer.weights.float()))
        parts.insert(0, _layer(layer, heads, weights))
    leaves_out_heads = any(len(part["heads"]) == 1 < len(layer.weights) for part, layer in zip(parts, layers))
    shown = None if image is None else scale_image(image)[0]
    data = dict(layers=parts, image=None, width=0, height=0, scale=1.0)
    if shown is not None:
        data |= dict(
            image=jpeg_url(shown), height=shown.shape[0], width=shown.shape[1], scale=shown.shape[1] / image.shape[1]
        )
    encoded = render_page(_TEMPLATE, title=title, data=data, leaves_out_heads=leaves_out_heads).encode()
    write_bytes(Path(path), encoded)
    return len(encoded)


def _layer(layer: PageLayer, heads: Sequence[str], weights: Tensor) -> dict[str, Any]:
    """Return a layer as JSON data for the page: the weights of each row in 0..255 of its largest, and that weight."""
    largest = weights.amax(-1)
    levels = (weights / largest.clamp(min=1e-12)[..., None] * 255).round().clamp(0, 255).to(torch.uint8)

    def axis(ends: Grid | Labels) -> dict[str, Any]:
        is_grid = isinstance(ends, tuple) and isinstance(ends[0], int)
        return dict(grid=list(ends)) if is_grid else dict(labels=list(ends))

    return dict(
        name=layer.name,
        heads=list(heads),
        rows=axis(layer.rows),
        columns=axis(layer.columns),
        covered=list(layer.covered),
        boxes=[[round(float(x), 1) for x in box] for box in layer.boxes_xyxy],
        levels=base64.b64encode(levels.cpu().numpy().tobytes()).decode(),
        largest=base64.b64encode(largest.cpu().numpy().astype("<f4").tobytes()).decode(),
    )
