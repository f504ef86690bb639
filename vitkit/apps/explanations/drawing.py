"""Draw what models look at: attention maps and sampling points on the image, and where each query predicts boxes."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from torch import Tensor

from vitkit.apps.explanations.regions import sampling_ratio
from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import class_color, save_figure, scale_image
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes

_PANEL = 3.4  # width of a panel in inches
_DPI = 130
_TITLE_WIDTH = 36  # characters per line of a panel's title
_MAX_COLUMNS = 4
_SMALL_AREA = 0.04
_SIZES = (
    ("small (under 4 % of the image)", "#2ca02c"),
    ("large, wider than high", "#d62728"),
    ("large, higher than wide", "#1f77b4"),
)
RATIO = "uniform attention"
"""What the figures compare the attention in an object's box or mask with; see `attention_ratio`."""
NUM_ARROWS = 20  # of a non-local block, as in figure 3 of https://arxiv.org/abs/1711.07971
COCO_SIZES = (("small (under 32² pixels)", "#2ca02c"), ("medium (under 96²)", "#ff7f0e"), ("large", "#9467bd"))


def overlay_attention(
    image: np.ndarray,
    weights: Tensor,
    *,
    color: tuple[int, int, int] | None = None,
    covered: tuple[float, float] = (1.0, 1.0),
    largest: float | None = None,
) -> np.ndarray:
    """Overlay an attention map on the gray image: the larger the weight, the stronger the color.

    Args:
        image: (H, W, 3) uint8 RGB.
        weights: (h, w) float; negative ones, as of dot-product non-local blocks, are drawn as 0.
        color: RGB in 0..255; None for a color scale from dark to bright.
        covered: height and width of the region that the map covers, relative to those of the image; above 1 if the map
            includes padding at the right and bottom.
        largest: the weight that is drawn in full color; None: the map's largest.
    Returns:
        (H, W, 3) uint8 RGB.
    """
    strength = _spread(weights, image.shape[:2], covered, largest)
    gray = image.astype(np.float32).mean(axis=2, keepdims=True) * 0.75
    heat = colormaps["inferno"](strength)[..., :3] * 255 if color is None else np.array(color, np.float32)
    fraction = 0.85 * strength[..., None]
    return (gray * (1 - fraction) + heat * fraction).astype(np.uint8)


def draw_encoder_attention(
    image: np.ndarray,
    points: Sequence[tuple[float, float]],
    weights: Tensor,
    path: str | Path,
    *,
    covered: tuple[float, float] = (1.0, 1.0),
    boxes: Sequence[tuple[Sequence[float], float]] = (),
    title: str = "",
) -> None:
    """Save a PNG with what chosen points of the image attend to (figure 3 of https://arxiv.org/abs/2005.12872).

    Args:
        image: (H, W, 3) uint8 RGB.
        points: N points (x, y) in pixels of the image.
        weights: (N, h, w), each point's attention over the map.
        path: the PNG's path; its folder is made.
        covered: see `overlay_attention`.
        boxes: for each point a box, xyxy in pixels of the image, and the point's `attention_ratio` in it; none: no
            boxes.
        title: the figure's title.
    """
    canvas, scale = scale_image(image)
    pixels = [(x * scale, y * scale) for x, y in points]
    figure, panels = _panels(1 + len(points), canvas.shape, title)
    panels[0].imshow(canvas)
    panels[0].set_title("points")
    for number, (panel, pixel, map_) in enumerate(zip(panels[1:], pixels, weights), start=1):
        mark_point(panels[0], pixel, number)
        panel.imshow(overlay_attention(canvas, map_, covered=covered))
        mark_point(panel, pixel, number)
        x, y = points[number - 1]
        panel.set_title(f"point {number}: x {x:.0f}, y {y:.0f}")
        if boxes:
            box_xyxy, ratio = boxes[number - 1]
            _draw_box(panel, scale * torch.tensor(box_xyxy), "limegreen")
            panel.set_title(f"point {number}: {ratio:.1f} x {RATIO}")
    save_figure(figure, path, dpi=_DPI)


def draw_word_attention(image: np.ndarray, words: Sequence[str], weights: Tensor, path: str | Path) -> None:
    """Save a PNG with what a captioner looked at for each word (figure 2 of https://arxiv.org/abs/1502.03044).

    Args:
        image: (H, W, 3) uint8 RGB.
        words: the N words of the caption.
        weights: (N, h, w), each word's attention over the map.
        path: the PNG's path; its folder is made.
    """
    canvas, _ = scale_image(image)
    figure, panels = _panels(1 + len(words), canvas.shape, textwrap.fill(" ".join(words), 80))
    panels[0].imshow(canvas)
    for panel, word, map_ in zip(panels[1:], words, weights, strict=True):
        panel.imshow(overlay_attention(canvas, map_))
        panel.set_title(f"{word}  {float(map_.max()):.2f}")
    panels[0].set_title("beside each word: its largest weight", fontsize="small")
    save_figure(figure, path, dpi=_DPI)


class QueryAttention(NamedTuple):
    """The prediction and the attention of one decoder query."""

    query: int
    """The query's index."""
    box_xyxy: Tensor
    """(4,) predicted box in pixels of the image."""
    name: str
    """Name of the predicted class."""
    score: float
    """Score of that class, in 0..1."""
    weights: Tensor
    """(h, w), the query's attention over the map."""
    ratio: float
    """Its `attention_ratio` in its box, or in its mask if the model predicts masks."""


def draw_decoder_attention(
    image: np.ndarray,
    queries: Sequence[QueryAttention],
    path: str | Path,
    *,
    covered: tuple[float, float] = (1.0, 1.0),
    title: str = "",
) -> None:
    """Save a PNG of what each box was predicted from (figure 6 of https://arxiv.org/abs/2005.12872).

    The first panel shows all boxes; each other panel shows one box with its query's attention in the box's color.

    Args:
        image: (H, W, 3) uint8 RGB.
        queries: at least one.
        path: the PNG's path; its folder is made.
        covered: see `overlay_attention`.
        title: the figure's title.
    """
    canvas, scale = scale_image(image)
    boxes_xyxy = torch.stack([query.box_xyxy for query in queries]) * scale
    names, scores = [query.name for query in queries], torch.tensor([query.score for query in queries])
    figure, panels = _panels(1 + len(queries), canvas.shape, title)
    # Colors here distinguish boxes, not classes.
    panels[0].imshow(draw_detections(canvas, boxes_xyxy, range(len(queries)), names, scores, min_side=1))
    panels[0].set_title("boxes")
    for k, (panel, query) in enumerate(zip(panels[1:], queries)):
        color = class_color(k)
        panel.imshow(overlay_attention(canvas, query.weights, color=color, covered=covered))
        _draw_box(panel, boxes_xyxy[k], np.array(color) / 255)
        panel.set_title(f"query {query.query}: {query.name} {query.score:.2f}\n{query.ratio:.1f} x {RATIO}")
    save_figure(figure, path, dpi=_DPI)


class QueryLayer(NamedTuple):
    """Sampling points of one query, or of one of its keypoints, in one decoder layer. Points and boxes are relative to
    the unpadded image."""

    locations: Tensor
    """(heads, groups, points, 2) xy of the sampling points, with levels from fine to coarse."""
    weights: Tensor
    """(heads, groups, points) attention weights in 0..1, which sum to 1 for each head."""
    reference: Tensor
    """(2,) xy or (4,) cxcywh, the reference of the sampling offsets."""
    box_cxcywh: Tensor
    """(4,) box predicted after the layer."""
    name: str
    """Name of the class predicted after the layer, or of the keypoint."""
    score: float | None
    """Score of that class, or the keypoint's probability of being labeled, in 0..1; None: not predicted."""
    levels: Sequence[int]
    """The level of each group of points."""
    keypoint: Tensor | None = None
    """(2,) xy of the predicted keypoint; None: for the query itself."""


def draw_sampling_points(
    image: np.ndarray, layers: Sequence[QueryLayer], path: str | Path, *, strides: Sequence[int], title: str = ""
) -> None:
    """Save a PNG with a query's reference point, sampling points and box (figure 6 of 2010.04159, appendix).

    There is a row per decoder layer, or per keypoint, a column per feature level and, if there are several, one for all
    levels together. The cross is the reference point (with a dashed box if the reference is a box), dots are sampling
    points, colored by attention weight on one scale for all layers, and the green box is the layer's prediction, the
    white X the keypoint.

    Args:
        image: (H, W, 3) uint8 RGB.
        layers: first to last, at least one; or the keypoints in one layer.
        path: the PNG's path; its folder is made.
        strides: the stride of each level in pixels.
        title: the figure's title.
    """
    canvas, _ = scale_image(image)
    height, width = canvas.shape[:2]
    columns = {f"level {level} (stride {stride})": [level] for level, stride in enumerate(strides)}
    if len(strides) > 1:
        columns["all levels"] = list(range(len(strides)))
    norm = Normalize(0, max(float(layer.weights.max()) for layer in layers))
    faded = (255 - (255 - canvas.astype(np.float32)) * 0.6).astype(np.uint8)
    panel_width = 2.6
    size = (panel_width * len(columns) + 1.8, panel_width * height / width * len(layers) + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(textwrap.fill(title, int(9 * size[0])), fontsize="large")
    rows = figure.subplots(len(layers), len(columns), squeeze=False)
    for panel, heading in zip(rows[0], columns):
        panel.set_title(heading)
    for number, (row, layer) in enumerate(zip(rows, layers)):
        ratio = float(sampling_ratio(layer.locations, layer.weights, layers[-1].box_cxcywh).mean())
        kind = "layer" if layer.keypoint is None else "point"
        score = "" if layer.score is None else f" {layer.score:.2f}"
        row[0].set_ylabel(f"{kind} {number}\n{layer.name}{score}\nin the box: {ratio:.1f} x uniform")
        for levels, panel in zip(columns.values(), row):
            panel.imshow(faded)
            panel.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))
            dots = _draw_query(panel, layer, levels, norm=norm)
    figure.colorbar(dots, ax=rows, label="attention weight", shrink=min(1.0, 2.5 / len(layers)), aspect=30)
    entries = {
        "reference": dict(marker="+", markersize=11, markeredgewidth=2.5, color="magenta", ls=""),
        "reference box": dict(color="magenta", ls="--", linewidth=2),
        "sampling point": dict(marker="o", color="gray", ls=""),
        "predicted box": dict(color="limegreen", linewidth=2),
    }
    if all(len(layer.reference) == 2 for layer in layers):
        del entries["reference box"]
    if layers[0].keypoint is not None:
        entries["predicted point"] = _KEYPOINT | dict(ls="")
    handles = [Line2D([], [], label=label, **style) for label, style in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * len(columns)), frameon=False)
    save_figure(figure, path, dpi=_DPI)


def draw_query_slots(
    boxes_cxcywh: Tensor,
    kinds: Tensor,
    path: str | Path,
    *,
    queries: Sequence[int],
    names: Sequence[tuple[str, str]] = _SIZES,
) -> None:
    """Save a PNG with the boxes that each query predicted over a dataset (figure 7 of 2005.12872).

    Each panel shows one query, with a dot per image at the center of the query's box, whatever its class, colored by
    the size of the box.

    Args:
        boxes_cxcywh: (N, Q, 4) in 0..1 of their images.
        kinds: (N, Q) indices into `names`, from `size_kinds`, or from `coco_sizes` with `COCO_SIZES`.
        path: the PNG's path; its folder is made.
        queries: indices of the queries to draw.
        names: the name and the color of each kind.
    """
    columns = min(len(queries), 5 if len(queries) <= 20 else 10)
    rows = math.ceil(len(queries) / columns)
    # The minimum width leaves room for the title and the legend, which are wider than a panel or two.
    figure = Figure(figsize=(max(7.5, 1.7 * columns), 1.9 * rows + 1.0), layout="constrained")
    figure.suptitle(f"Box centers of each query over {len(boxes_cxcywh)} images", fontsize="large")
    dot = min(9.0, max(1.0, 3000 / len(boxes_cxcywh)))
    for k, query in enumerate(queries, start=1):
        panel = figure.add_subplot(rows, columns, k)
        panel.set_title(f"query {query}", fontsize="small", pad=3)
        panel.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], aspect="equal")
        colors = np.array([color for _, color in names])[kinds[:, query].numpy()]
        panel.scatter(*boxes_cxcywh[:, query, :2].T.numpy(), s=dot, c=colors, linewidths=0)
    handles = [Line2D([], [], marker="o", color=color, ls="", label=label) for label, color in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path, dpi=_DPI)


def size_kinds(boxes_cxcywh: Tensor, aspect_ratios: Tensor) -> Tensor:
    """Classify boxes: 0 covers less than 4 % of its image, 1 is larger and wide, 2 is larger and high.

    Args:
        boxes_cxcywh: (..., 4) in 0..1 of their images.
        aspect_ratios: width / height of the images, broadcastable to (...).
    Returns:
        (...) int64.
    """
    width, height = boxes_cxcywh[..., 2:].unbind(-1)
    return torch.where(width * height < _SMALL_AREA, 0, torch.where(width * aspect_ratios >= height, 1, 2))


def coco_sizes(boxes_cxcywh: Tensor, areas: Tensor) -> Tensor:
    """Classify boxes as COCO does: 0 is small, 1 medium, 2 large.

    Args:
        boxes_cxcywh: (..., 4) in 0..1 of their images.
        areas: areas of the images in pixels, broadcastable to (...).
    Returns:
        (...) int64.
    """
    covered = boxes_cxcywh[..., 2:].prod(-1) * areas
    return torch.bucketize(covered, torch.tensor([32.0**2, 96.0**2]), right=True)


def _spread(
    weights: Tensor, size: tuple[int, int], covered: tuple[float, float], largest: float | None = None
) -> np.ndarray:
    """Upsample a map to (H, W) float32 in 0..1 over the image, without the padding."""
    height, width = (round(side * factor) for side, factor in zip(size, covered))
    # Hard attention reads one location, beyond which nothing may be colored.
    mode = "nearest" if weights.count_nonzero() == 1 else "bilinear"
    weights = F.interpolate(weights.float().cpu()[None, None], size=(height, width), mode=mode)[0, 0]
    weights = weights[: size[0], : size[1]]
    return (weights / max(weights.max().item() if largest is None else largest, 1e-12)).clamp(0, 1).numpy()


def _panels(number: int, shape: tuple[int, ...], title: str) -> tuple[Figure, list[Axes]]:
    """Make a figure of `number` panels for images of shape (height, width, 3)."""
    rows = math.ceil(number / _MAX_COLUMNS)
    columns = math.ceil(number / rows)
    figure = Figure(
        figsize=(_PANEL * columns + 0.2, (_PANEL * shape[0] / shape[1] + 0.4) * rows + 0.5), layout="constrained"
    )
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH * columns), fontsize="large")
    panels = [figure.add_subplot(rows, columns, k + 1) for k in range(number)]
    for panel in panels:
        panel.set_axis_off()
    return figure, panels


def mark_point(panel: Axes, pixel: tuple[float, float], number: int) -> None:
    """Mark a point (x, y) of a panel with a numbered dot whose color depends on the number."""
    red, green, blue = class_color(number - 1)
    color = (red / 255, green / 255, blue / 255)
    panel.plot(*pixel, marker="o", markersize=13, color=color, markeredgecolor="white", markeredgewidth=1.5)
    # The outline keeps the number legible on bright colors.
    text = panel.annotate(str(number), pixel, color="white", fontsize=8, fontweight="bold", ha="center")
    text.set(va="center_baseline", path_effects=[withStroke(linewidth=2, foreground="black")])


_KEYPOINT = dict(marker="X", markersize=11, color="white", markeredgecolor="black")


def _draw_box(panel: Axes, box_xyxy: Tensor, color: object, style: str = "-") -> None:
    x0, y0, x1, y1 = box_xyxy.tolist()
    panel.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color=color, linewidth=2, linestyle=style))


def _draw_query(panel: Axes, layer: QueryLayer, levels: list[int], *, norm: Normalize) -> object:
    """Draw a layer's sampling points on the chosen levels, its reference and its box; return the dots."""
    height, width = panel.get_ylim()[0], panel.get_xlim()[1]
    size = torch.tensor([width, height])
    groups = [group for group, level in enumerate(layer.levels) if level in levels]
    weights = layer.weights[:, groups].flatten()
    order = weights.argsort()  # the largest on top
    locations = layer.locations[:, groups].reshape(-1, 2)[order] * size
    style = dict(s=14, cmap="turbo", norm=norm, edgecolors="black", linewidths=0.3)
    dots = panel.scatter(*locations.T, c=weights[order], **style)
    boxes = [(layer.box_cxcywh, "limegreen", "-")]
    if len(layer.reference) == 4:
        boxes.insert(0, (layer.reference, "magenta", "--"))
    for box_cxcywh, color, style in boxes:
        box_xyxy = scale_boxes(cxcywh_to_xyxy(box_cxcywh)[None, None], [(height, width)])[0, 0]
        _draw_box(panel, box_xyxy, color, style)
    panel.plot(*(layer.reference[:2] * size), marker="+", markersize=11, markeredgewidth=2.5, color="magenta")
    if layer.keypoint is not None:
        panel.plot(*(layer.keypoint * size), **_KEYPOINT)
    return dots
