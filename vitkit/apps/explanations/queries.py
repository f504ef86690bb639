"""Figures of queries and points, head by head and layer by layer (DETR, MaskFormer, Mask2Former, EoMT)."""

from collections.abc import Sequence
from pathlib import Path

from vitkit.apps.explanations.images import ImageAttention, Point, cell_of
from vitkit.apps.explanations.panels import Panel, draw_rows


def draw_point_heads(attention: ImageAttention, points: Sequence[Point], path: Path) -> Path:
    """Save a PNG of what points attend to in the encoder: a row for each point, a column for each head."""
    layer, size = attention.encoder, attention.image.shape[:2]
    rows = []
    for i, point in enumerate(points):
        heads = layer.heads[:, cell_of(point, size, layer.maps.shape[-2:], layer.covered)]
        panels = [
            Panel("" if i else name, weights, layer.covered, points=[point], first_point=i)
            for name, weights in [("mean", heads.mean(0)), *((f"head {k}", map_) for k, map_ in enumerate(heads))]
        ]
        rows.append((f"point {i + 1}", [None if i else Panel("image", points=points), *panels]))
    draw_rows(attention.image, rows, path, title=f"Encoder self-attention, layer {layer.layer}, head by head")
    return path


def draw_query_heads(attention: ImageAttention, queries: Sequence[int], path: Path) -> Path:
    """Save a PNG of what queries attend to in a decoder layer: a row for each query, a column for each head."""
    layer, (scores, labels, boxes_xyxy, *_) = attention.decoder, attention.queries
    rows = []
    for query in queries:
        name = f"query {query}: {attention.classes[labels[query]]} {scores[query]:.2f}"
        heads, box = layer.heads[:, query], [boxes_xyxy[query].tolist()]
        ratios = layer.ratios(query, attention.queries.region(query))
        panels = [
            Panel(f"{head}: {ratio:.1f}", weights, layer.covered, boxes_xyxy=box)
            for head, weights, ratio in [
                ("mean", heads.mean(0), ratios.mean()),
                *((f"head {k}", map_, ratio) for k, (map_, ratio) in enumerate(zip(heads, ratios))),
            ]
        ]
        rows.append((name, panels))
    region = "box" if attention.queries.masks is None else "mask"
    title = f"Decoder cross-attention, layer {layer.layer}, head by head; attention in its {region} relative to uniform"
    draw_rows(attention.image, rows, path, title=title)
    return path


def draw_query_layers(attention: ImageAttention, query: int, path: Path) -> Path:
    """Save a PNG of one query through the decoder: a column for each layer.

    The rows show the region that the query may attend to (Mask2Former), its attention, and the box or mask predicted
    after the layer.
    """
    layers, predictions = attention.decoder_layers, attention.predictions(query)
    rows = []
    if layers[0].gates is not None:
        # Enlarged, as panels interpolate between the centers of cells, which would blur a gate's borders.
        gates = [x.gates[query].float().repeat_interleave(8, 0).repeat_interleave(8, 1) for x in layers]
        panels = [Panel(weights=gate, covered=x.covered, largest=1.0) for gate, x in zip(gates, layers)]
        rows.append(("may attend to", panels))
    ratios = attention.query_ratios([query])[:, 0].mean(1).tolist()
    rows.append(("attends to", [Panel(f"{ratio:.1f} x", x.maps[query], x.covered) for x, ratio in zip(layers, ratios)]))
    after = []
    for name, box, mask in predictions:
        outline = None if mask is None else mask.numpy()
        after.append(Panel(name, boxes_xyxy=[] if box is None else [box.tolist()], outline=outline))
    if after:
        rows.append(("predicts", after))
    name, panels = rows[0]
    titles = [f"layer {x.layer}{', ' if part.title else ''}{part.title}" for part, x in zip(panels, layers)]
    rows[0] = (name, [part._replace(title=title) for part, title in zip(panels, titles)])
    extent = "through the decoder layers" if len(layers) > 1 else f"in layer {layers[0].layer}"
    region = "box" if attention.queries.masks is None else "mask"
    title = f"Query {query} {extent}, mean of the heads; x: attention in its final {region} relative to uniform"
    draw_rows(attention.image, rows, path, title=title)
    return path
