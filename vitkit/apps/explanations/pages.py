"""The layers of the interactive HTML page that shows attention under the pointer, for each kind of model."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.apps.explanations.attention_locations import LocatedAttention
from vitkit.apps.explanations.html_page import PageLayer
from vitkit.apps.explanations.images import ImageAttention, ImageSampling, QueryPredictions
from vitkit.apps.explanations.prompt_attention import PromptAttention
from vitkit.apps.explanations.text import TextAttention
from vitkit.text.vocabulary import SPACE

MAX_ROWS = 14
"""The maximum number of locations along the longer side that can be pointed at."""
MAX_COLUMNS = 28
"""The maximum number of cells along the longer side of the attention maps; larger maps are pooled."""
MAX_QUERIES = 100

Covered = tuple[float, float]


def pool_maps(maps: Tensor, covered: Covered = (1.0, 1.0)) -> tuple[Tensor, Covered]:
    """Sum-pool maps (..., h, w) to at most `MAX_COLUMNS` cells a side; return them and what they cover."""
    height, width = maps.shape[-2:]
    factor = -(-max(height, width) // MAX_COLUMNS)
    maps = F.pad(maps, (0, -width % factor, 0, -height % factor))
    covered = (covered[0] * maps.shape[-2] / height, covered[1] * maps.shape[-1] / width)
    return maps.unflatten(-1, (-1, factor)).sum(-1).unflatten(-2, (-1, factor)).sum(-2), covered


def backbone_page(layers: Sequence[LocatedAttention], *, class_token: bool) -> list[PageLayer]:
    """Return what locations, and the class token, attend to in a backbone."""
    page = []
    for layer in layers:
        longest = min(MAX_ROWS, max(layer.map_size))
        rows, columns = (max(1, round(longest * n / max(layer.map_size))) for n in layer.map_size)
        _, covered = pool_maps(torch.zeros(layer.map_size), layer.covered)
        y, x = (side * factor / count for side, factor, count in zip(layer.image_size, covered, (rows, columns)))
        points = [((j + 0.5) * x, (i + 0.5) * y) for i in range(rows) for j in range(columns)]
        maps, _ = pool_maps(torch.stack([layer.at(point) for point in points], dim=1))
        page.append(PageLayer(layer.label, maps.flatten(2), (rows, columns), tuple(maps.shape[-2:]), covered))
        if class_token:
            maps, _ = pool_maps(layer.class_token()[:, None])
            size = tuple(maps.shape[-2:])
            page.append(PageLayer(f"{layer.label} class token", maps.flatten(2), ["class token"], size, covered))
    return page


def query_page(attention: ImageAttention, queries: Sequence[int]) -> list[PageLayer]:
    """Return what locations attend to in the encoder, and queries in the decoder."""
    page = []
    if attention.encoder is not None:
        layer, size = attention.encoder, attention.encoder.heads.shape[-2:]
        maps, covered = pool_maps(layer.heads, layer.covered)
        # One location from each pooled region.
        factor = -(-max(size) // MAX_COLUMNS)
        maps = maps.unflatten(1, size)[:, ::factor, ::factor]
        grid = tuple(maps.shape[-2:])
        page.append(PageLayer(f"encoder {layer.layer}", maps.flatten(1, 2).flatten(2), grid, grid, covered))
    if attention.queries is not None:
        names, boxes = _name_queries(attention.queries, attention.classes, queries)
        for layer in attention.decoder_layers:
            maps, covered = pool_maps(layer.heads[:, queries], layer.covered)
            size = tuple(maps.shape[-2:])
            page.append(PageLayer(f"decoder {layer.layer}", maps.flatten(2), names, size, covered, boxes))
    return page


def _name_queries(
    predicted: QueryPredictions, classes: Sequence[str], queries: Sequence[int]
) -> tuple[list[str], list[list[float]]]:
    """Return the names and the boxes, xyxy, of queries."""
    names = [f"{k}: {classes[predicted.labels[k]]} {predicted.scores[k]:.2f}" for k in queries]
    return names, predicted.boxes_xyxy[queries].tolist()


def sampling_page(sampling: ImageSampling, queries: Sequence[int]) -> list[PageLayer]:
    """Return where queries sample, layer by layer: each point's weight is added to its cell of a coarse map."""
    height, width = sampling.image.shape[:2]
    size = [max(1, round(2 * MAX_ROWS * side / max(height, width))) for side in (height, width)]
    names, boxes = _name_queries(sampling.queries, sampling.classes, queries)
    layers = list(zip(*(sampling.layers(query) for query in queries)))  # by decoder layer
    page = []
    for number, of_queries in enumerate(layers):
        heads = len(of_queries[0].weights)
        maps = torch.zeros(heads, len(queries), size[0] * size[1])
        for k, query in enumerate(of_queries):
            locations = query.locations.flatten(1, 2)
            is_inside = ((locations >= 0) & (locations < 1)).all(-1)  # outside of the image a point reads zeros
            cells = (locations.clamp(0, 1 - 1e-6) * torch.tensor(size[::-1])).long()
            weights = query.weights.flatten(1) * is_inside
            maps[:, k].scatter_add_(1, cells[..., 1] * size[1] + cells[..., 0], weights)
        page.append(PageLayer(f"decoder {number}", maps, names, tuple(size), boxes_xyxy=boxes))
    return page


def prompt_page(attention: PromptAttention, queries: QueryPredictions, shown: Sequence[int]) -> list[PageLayer]:
    """Return what queries read in a prompt, layer by layer, where its words look, and what locations read in it."""
    names, boxes = _name_queries(queries, attention.phrases, shown)
    words = [f"{k}: {word}" for k, word in enumerate(attention.words)]  # a word may be there twice
    page = [
        PageLayer(f"words read, decoder {i}", heads[:, shown], names, words, boxes_xyxy=boxes)
        for i, heads in enumerate(attention.reads)
    ]
    for level, layer in enumerate(attention.looks):
        maps, covered = pool_maps(layer.heads, layer.covered)
        page.append(PageLayer(f"words look, map {level}", maps.flatten(2), words, tuple(maps.shape[-2:]), covered))
    if attention.located is not None:
        grid = tuple(attention.located.heads.shape[-2:])
        weights, covered = attention.location_reads, attention.located.covered
        page.append(PageLayer("words that locations read", weights, grid, words, covered))
    return page


def text_page(attention: TextAttention) -> list[PageLayer]:
    """Return what tokens attend to."""
    return [
        PageLayer(f"{layer.kind} {layer.number}", layer.weights, _readable(layer.rows), _readable(layer.columns))
        for layer in attention.layers
    ]


def word_page(words: Sequence[str], maps: Tensor) -> list[PageLayer]:
    """Return what a captioner looked at for each word; maps (words, h, w)."""
    maps, covered = pool_maps(maps)
    return [PageLayer("words", maps.flatten(1)[None], list(words), tuple(maps.shape[-2:]), covered)]


def _readable(tokens: Sequence[str]) -> list[str]:
    return [token.replace(SPACE, " ") if token.strip(SPACE + " ") else "␣" for token in tokens]
