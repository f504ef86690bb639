"""Write one self-contained HTML file that shows attention under the pointer: of a pixel, a query, a token or a head."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.io.output import write_bytes
from vitkit.errors import ConfigError
from vitkit.visualization.canvas import scaled
from vitkit.visualization.html import html_page, jpeg_url, script_json

MAX_BYTES = 3_200_000
"""The limit for all weights together in bytes; with base64 and the picture, the file stays below 5 MB."""

Grid = tuple[int, int]
Labels = Sequence[str]


@dataclass
class PageLayer:
    """The attention of one layer from rows to columns, each of them locations of the picture, queries or tokens."""

    name: str
    weights: Tensor
    """(heads, N, M) attention weights, at least 0; the page also shows the mean of the heads."""
    rows: Grid | Labels
    """(height, width) of a grid of N locations, row by row; or N labels."""
    columns: Grid | Labels
    """(height, width) of a grid of M locations, row by row; or M labels."""
    covered: tuple[float, float] = (1.0, 1.0)
    """Height and width of the region that grids of locations cover, relative to those of the picture."""
    boxes_xyxy: Sequence[Sequence[float]] = field(default_factory=list)
    """The boxes of labelled rows, in pixels of the picture; may be empty."""


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
            f"--html: {MAX_BYTES - left} weights, the mean of the heads alone, are too many for a page; expected at "
            f"most {MAX_BYTES}. Give a shorter text or clip, or leave --html out."
        )
    parts: list[dict[str, Any]] = []
    for layer, mean in zip(reversed(layers), reversed(means)):
        heads, weights = ["mean"], mean
        if len(layer.weights) > 1 and layer.weights.numel() <= left:
            left -= layer.weights.numel()
            heads += [f"head {k}" for k in range(len(layer.weights))]
            weights = torch.cat((mean, layer.weights.float()))
        parts.insert(0, _layer(layer, heads, weights))
    note = ""
    if any(len(part["heads"]) == 1 < len(layer.weights) for part, layer in zip(parts, layers)):
        note = "To keep this file small, single heads are shown of the last layers alone."
    shown = None if image is None else scaled(image)[0]
    data = dict(layers=parts, image=None, width=0, height=0, scale=1.0)
    if shown is not None:
        data |= dict(
            image=jpeg_url(shown), height=shown.shape[0], width=shown.shape[1], scale=shown.shape[1] / image.shape[1]
        )
    body = _BODY.replace("@TITLE@", html.escape(title)).replace("@NOTE@", note)
    page = html_page(title, body, style=_STYLE, script=f"const data = {script_json(data)};\n{_SCRIPT}")
    encoded = page.encode()
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


_STYLE = """
main { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
canvas { border: 1px solid #ccc; cursor: crosshair; }
button { font: inherit; border: 1px solid #ccc; background: #fff; padding: .1rem .5rem; margin: 0 .2rem .3rem 0; }
button.on { background: #264f8f; color: #fff; }
.tokens span { display: block; padding: .05rem .5rem; white-space: pre; border-left: 3px solid transparent; }
.tokens span.on { border-color: #264f8f; background: #e4ebf7; }
.tokens:empty { display: none; }
.tokens { max-height: 640px; overflow: auto; min-width: 7rem; }
#text { min-height: 1.4em; color: #555; }
"""
_BODY = """
<h1>@TITLE@</h1>
<p>@NOTE@ Click a layer to choose it. Point at a head, or at a location, a query or a token to see what that attends to;
a click on one of the latter holds it.</p>
<div id="layers"></div><div id="heads"></div><p id="text"></p>
<main>
<div class="tokens" id="rows"></div><canvas id="canvas" hidden></canvas><div class="tokens" id="columns"></div>
</main>
"""
_SCRIPT = """
const $ = id => document.getElementById(id), canvas = $("canvas"), pen = canvas.getContext("2d");
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
const count = axis => axis.grid ? axis.grid[0] * axis.grid[1] : axis.labels.length;
for (const layer of data.layers) {
  layer.levels = bytes(layer.levels);
  layer.largest = new Float32Array(bytes(layer.largest).buffer);
}
let layer = data.layers[data.layers.length - 1], head = 0, row = 0, held = false;
const picture = new Image(), heat = document.createElement("canvas");

function color(t) {  // dark purple, red, yellow
  const stops = [[20, 11, 53], [187, 55, 84], [249, 142, 9], [252, 255, 164]];
  const x = t * 3, i = Math.min(2, Math.floor(x));
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (x - i)));
}
function middle([height, width], i) {  // of a cell, in the picture's pixels
  const [y, x] = layer.covered, [left, top] = [i % width, Math.floor(i / width)];
  return "(" + Math.round((left + .5) / width * x * data.width / data.scale) + ", " +
    Math.round((top + .5) / height * y * data.height / data.scale) + ")";
}
function weights() {
  const size = count(layer.columns), start = (head * count(layer.rows) + row) * size;
  return layer.levels.subarray(start, start + size);
}
function draw() {
  const levels = weights(), largest = layer.largest[head * count(layer.rows) + row];
  let best = 0;
  levels.forEach((level, i) => { if (level > levels[best]) best = i; });
  let source, target;
  if (layer.rows.grid) source = "location " + middle(layer.rows.grid, row);
  else source = layer.rows.labels[row];
  if (layer.columns.grid) target = "location " + middle(layer.columns.grid, best);
  else target = layer.columns.labels[best];
  $("text").textContent = layer.name + ", " + layer.heads[head] + ": " + source + " attends most to " + target +
    ", with " + largest.toFixed(3) + (held ? " (held: click again to release)" : "");
  for (const [i, span] of [...$("rows").children].entries()) span.className = i === row ? "on" : "";
  for (const [i, span] of [...$("columns").children].entries())
    span.style.background = "rgba(249, 142, 9, " + levels[i] / 255 * largest + ")";
  if (canvas.hidden) return;
  pen.filter = "grayscale(1) brightness(.8)";
  pen.drawImage(picture, 0, 0);
  pen.filter = "none";
  if (layer.columns.grid) {
    const [height, width] = layer.columns.grid;
    heat.width = width; heat.height = height;
    const map = heat.getContext("2d"), pixels = map.createImageData(width, height);
    levels.forEach((level, i) => pixels.data.set([...color(level / 255), 30 + level * .7], 4 * i));
    map.putImageData(pixels, 0, 0);
    pen.drawImage(heat, 0, 0, data.width * layer.covered[1], data.height * layer.covered[0]);
  }
  pen.lineWidth = 2;
  pen.strokeStyle = "#00ff9c";
  if (layer.rows.grid) {
    const [height, width] = layer.rows.grid;
    const w = data.width * layer.covered[1] / width, h = data.height * layer.covered[0] / height;
    pen.strokeRect(row % width * w, Math.floor(row / width) * h, w, h);
  } else if (layer.boxes.length) {
    const [x0, y0, x1, y1] = layer.boxes[row].map(x => x * data.scale);
    pen.strokeRect(x0, y0, x1 - x0, y1 - y0);
  }
}
function buttons(id, names, chosen, choose) {
  $(id).replaceChildren(...names.map((name, i) => {
    const button = document.createElement("button");
    button.textContent = name;
    button.className = i === chosen ? "on" : "";
    for (const event of ["mouseenter", "click"]) button.addEventListener(event, () => choose(i, event === "click"));
    return button;
  }));
}
function spans(id, axis, choose) {
  $(id).replaceChildren(...(axis.labels || []).map((label, i) => {
    const span = document.createElement("span");
    span.textContent = label;
    for (const event of choose ? ["mouseenter", "click"] : [])
      span.addEventListener(event, () => choose(i, event === "click"));
    return span;
  }));
}
function point(i, isClick) {
  if (isClick) held = !held;
  if (isClick || !held) { row = i; draw(); }
}
function showHeads() {
  buttons("heads", layer.heads, head, i => {
    head = i;
    [...$("heads").children].forEach((button, k) => { button.className = k === head ? "on" : ""; });
    draw();
  });
}
function show(i, isClick) {
  if (!isClick) return;
  layer = data.layers[i];
  head = Math.min(head, layer.heads.length - 1);
  row = Math.min(row, count(layer.rows) - 1);
  buttons("layers", data.layers.map(l => l.name), i, show);
  showHeads();
  spans("rows", layer.rows, point);
  spans("columns", layer.columns);
  canvas.hidden = !data.image || !(layer.rows.grid || layer.columns.grid);
  draw();
}
function at(event) {
  if (!layer.rows.grid) return null;
  const [height, width] = layer.rows.grid, box = canvas.getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width / layer.covered[1] * width);
  const y = Math.floor((event.clientY - box.top) / box.height / layer.covered[0] * height);
  return x < 0 || y < 0 || x >= width || y >= height ? null : y * width + x;
}
for (const event of ["mousemove", "click"]) canvas.addEventListener(event, e => {
  const i = at(e);
  if (i !== null) point(i, event === "click");
});
canvas.width = data.width; canvas.height = data.height;
picture.onload = () => show(data.layers.length - 1, true);
if (data.image) picture.src = data.image; else show(data.layers.length - 1, true);
"""
