"""Figures of queries and points, head by head and layer by layer (DETR, MaskFormer, Mask2Former, EoMT)."""

from collections.abc import Sequence
from pathlib import Path

from vitkit.explanations.images import ImageAttention, Point, cell_of
from vitkit.explanations.panels import Panel, draw_rows


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
    for i, query in enumerate(queries):
        name = f"query {query}: {attention.classes[labels[query]]} {scores[query]:.2f}"
        heads, box = layer.heads[:, query], [boxes_xyxy[query].tolist()]
        panels = [
            Panel("" if i else head, weights, layer.covered, boxes_xyxy=box)
            for head, weights in [("mean", heads.mean(0)), *((f"head {k}", map_) for k, map_ in enumerate(heads))]
        ]
        rows.append((name, panels))
    draw_rows(attention.image, rows, path, title=f"Decoder cross-attention, layer {layer.layer}, head by head")
    return path


def draw_query_layers(attention: ImageAttention, query: int, path: Path) -> Path:
    """Save a PNG of one query through the decoder: a column for each layer.

    The rows show the region that the query may attend to (Mask2Former), its attention, and the box or mask predicted
    after the layer.
    """
    layers, predictions = attention.decoder_layers, attention.predictions(query)
    rows = []
    if layers[0].gates is not None:
        # Enlarged, as panels interpolate between the centres of cells, which would blur a gate's borders.
        gates = [x.gates[query].float().repeat_interleave(8, 0).repeat_interleave(8, 1) for x in layers]
        panels = [Panel(weights=gate, covered=x.covered, largest=1.0) for gate, x in zip(gates, layers)]
        rows.append(("may attend to", panels))
    rows.append(("attends to", [Panel(weights=x.maps[query], covered=x.covered) for x in layers]))
    after = []
    for name, box, mask in predictions:
        outline = None if mask is None else mask.numpy()
        after.append(Panel(name, boxes_xyxy=[] if box is None else [box.tolist()], outline=outline))
    if after:
        rows.append(("predicts", after))
    name, panels = rows[0]
    rows[0] = (name, [part._replace(title=f"layer {x.layer}") for part, x in zip(panels, layers)])
    extent = "through the decoder layers" if len(layers) > 1 else f"in layer {layers[0].layer}"
    draw_rows(attention.image, rows, path, title=f"Query {query} {extent}, mean of the heads")
    return path
