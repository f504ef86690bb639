"""Figures of text-prompted detectors: the words that each box read, where each word looks, and why a box has its
label."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vitkit.apps.explanations.dense import MAX_BOXES, choose_queries, page_queries
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.explanations.images import QueryPredictions
from vitkit.apps.explanations.pages import prompt_page
from vitkit.apps.explanations.panels import Panel, draw_rows
from vitkit.apps.explanations.prompt_attention import PromptAttention, prompt_attention
from vitkit.apps.explanations.text_drawing import draw_heads
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.visualization.canvas import save_figure

MAX_PHRASES = 3
"""The most phrases whose words' attention to the image is drawn."""
MAX_WORDS = 40
"""The most words that are drawn beside a box; of a longer prompt, those of the phrases with the highest scores."""
_BAR, _ROW, _CROP = 0.24, 1.15, 1.3  # inches: a word's bar, a box's row, its part of the image


def explain_prompt(predictor: Predictor, image: np.ndarray, request: ExplainRequest, result: Explanation) -> None:
    """Draw which words the best queries read, why they have their labels, and where words look."""
    attention, view = prompt_attention(predictor, image)
    result.prompt = attention
    queries = QueryPredictions.of(view)
    chosen = choose_queries(predictor, queries, request, result, MAX_BOXES)
    draw_box_words(view.image, attention, queries, chosen, result.file("box_words.png"))
    names = [f"query {k}: {attention.phrases[queries.labels[k]]}" for k in chosen]
    if len(attention.reads):
        shown, note = _shown_words(attention, queries.labels[chosen].tolist(), chosen)
        rows, words = attention.reads[:, :, chosen][..., shown].numpy(), [attention.words[k] for k in shown]
        # Some heads attend to the end of the prompt alone, beside which the words of phrases would all be dark.
        largest = float(rows[..., (attention.phrase_of[shown] >= 0).numpy()].max())
        title = f"What queries read, by layer{note}"
        draw_heads(rows, names, words, result.file("prompt_heads.png"), title=title, largest=largest)
        for query, name in zip(chosen, names):
            label, read = int(queries.labels[query]), attention.most_read(query)
            fraction = attention.on_phrase(query, label)
            result.numbers[f"{name}: fraction of its attention to the prompt on this phrase"] = fraction
            if read != label:
                more, less = (attention.read_per_word(query, phrase) for phrase in (read, label))
                other = attention.phrases[read]
                result.notes.append(f"{name}: it reads {other!r} more ({more:.2f} a word) than its own ({less:.2f})")
    else:
        result.notes.append("no figure of what queries read in the prompt: only locations attend to its words")
    if attention.looks:
        strides = [info.stride for info in predictor.model.neck.feature_info.values()]
        shown = list(dict.fromkeys(queries.labels[chosen].tolist()))[:MAX_PHRASES]
        boxes = {phrase: [query for query in chosen if queries.labels[query] == phrase] for phrase in shown}
        draw_word_locations(view.image, attention, queries, boxes, strides, result.file("word_locations.png"))
        for phrase, of_phrase in boxes.items():
            region = torch.stack([queries.region(query) for query in of_phrase]).any(0)
            ratios = [attention.ratio(word, region) for word in attention.words_of(phrase)]
            name = f"{attention.phrases[phrase]}: attention of its words in its boxes, relative to uniform attention"
            result.numbers[name] = sum(ratios) / len(ratios)
    if request.html and (len(attention.reads) or attention.looks):
        layers = prompt_page(attention, queries, page_queries(request, queries.scores))
        result.page(layers, "prompt.html", title="Words and the image", image=view.image)


def draw_box_words(
    image: np.ndarray, attention: PromptAttention, queries: QueryPredictions, chosen: Sequence[int], path: str | Path
) -> None:
    """Save a PNG with a row for each box: its part of the image, the words that its query reads in the last decoder
    layer, and the probability of each word, whose mean over a phrase is the phrase's score.

    Args:
        image: (H, W, 3) uint8 RGB.
        chosen: the queries to draw, at least one.
        path: the PNG's path; its folder is made.
    """
    shown, note = _shown_words(attention, queries.labels[chosen].tolist(), chosen)
    reads = attention.reads[-1].mean(0) if len(attention.reads) else None
    highest = 1.05 * float(reads[list(chosen)].max()) if reads is not None else 1.0
    charts = 1 + (reads is not None)
    width = max(2.4, _BAR * len(shown))
    longest = max(len(attention.words[k]) for k in shown)
    figure = Figure(
        figsize=(_CROP + charts * (width + 0.35) + 0.3, _ROW * len(chosen) + 0.09 * longest + 0.75),
        layout="constrained",
    )
    figure.suptitle(f"What each box read in the prompt, and why it has its label{note}", fontsize=9)
    axes = figure.subplots(len(chosen), 1 + charts, squeeze=False, width_ratios=[_CROP, *[width] * charts])
    for line, query in zip(axes, chosen):
        label = int(queries.labels[query])
        _draw_crop(line[0], image, queries.boxes_xyxy[query].tolist())
        name = textwrap.fill(f"{attention.phrases[label]} {queries.scores[query]:.2f}", 22)
        line[0].set_xlabel(name, fontsize=8, labelpad=2)
        if reads is not None:
            _draw_bars(line[1], attention, shown, reads[query], label)
            line[1].set(ylim=(0, highest), yticks=[0, round(highest / 2, 2)])
        _draw_bars(line[-1], attention, shown, attention.probabilities[query], label, attention.scores[query])
        line[-1].set(ylim=(0, 1.05), yticks=[0, 0.5, 1])
    axes[0, 1].set_title("attention to the words, last layer", fontsize=8)
    axes[0, -1].set_title("probability; line: mean of a phrase", fontsize=8)
    for axis in axes[-1, 1:]:
        axis.set_xticks(range(len(shown)), [attention.words[k] for k in shown], rotation=90, fontsize=7)
    save_figure(figure, path, dpi=130)


def _draw_bars(
    axis: Axes,
    attention: PromptAttention,
    shown: Sequence[int],
    values: Tensor,
    label: int,
    means: Tensor | None = None,
) -> None:
    """Draw a bar for each of the shown words, with those of the phrase `label` in green, and the means of phrases."""
    phrases = attention.phrase_of[list(shown)].tolist()
    colors = ["tab:green" if phrase == label else "0.6" if phrase < 0 else "tab:blue" for phrase in phrases]
    axis.bar(range(len(shown)), values[list(shown)].numpy(), color=colors, width=0.8)
    axis.set_xticks([])
    axis.set_xlim(-0.6, len(shown) - 0.4)
    axis.tick_params(axis="y", labelsize=6, length=2, pad=1)
    axis.spines[["top", "right"]].set_visible(False)
    for phrase in dict.fromkeys(phrases):
        places = [i for i, other in enumerate(phrases) if other == phrase]
        if phrase >= 0 and phrase % 2 == 0:
            axis.axvspan(places[0] - 0.5, places[-1] + 0.5, color="0.94", zorder=-1)
        if phrase >= 0 and means is not None:
            axis.hlines(float(means[phrase]), places[0] - 0.5, places[-1] + 0.5, color="black", linewidth=1.2)
            if phrase == label:
                axis.text(places[-1] + 0.6, float(means[phrase]), f"{means[phrase]:.2f}", fontsize=6.5, va="center")


def _shown_words(attention: PromptAttention, labels: Sequence[int], chosen: Sequence[int]) -> tuple[list[int], str]:
    """Return the words to draw, in order, and what is left out: those of the boxes' phrases, then of those with the
    highest scores, as many as fit, each with the separator after it."""
    ranked = attention.scores[list(chosen)].amax(0).argsort(descending=True).tolist()
    owners, previous = [], -1
    for phrase in attention.phrase_of.tolist():
        owners.append(previous if phrase < 0 else phrase)
        previous = phrase
    kept = set()
    for phrase in dict.fromkeys([*labels, *ranked]):
        if sum(owner in kept for owner in owners) + owners.count(phrase) <= MAX_WORDS:
            kept.add(phrase)
    shown = [k for k, owner in enumerate(owners) if owner in kept or owner < 0]
    total = len(attention.phrases)
    return shown, "" if len(kept) == total else f"; {len(kept)} of {total} phrases"


def _draw_crop(axis: Axes, image: np.ndarray, box_xyxy: Sequence[float]) -> None:
    """Draw a box and the part of the image around it."""
    height, width = image.shape[:2]
    x0, y0, x1, y1 = box_xyxy
    margin = 0.15 * max(x1 - x0, y1 - y0, 8)
    axis.imshow(image, extent=(0, width, height, 0))
    axis.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, color="#00ff9c", linewidth=1.2))
    left, top = min(max(0, x0 - margin), width - 1), min(max(0, y0 - margin), height - 1)
    right, bottom = max(min(x1 + margin, width), left + 1), max(min(y1 + margin, height), top + 1)
    axis.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])


def draw_word_locations(
    image: np.ndarray,
    attention: PromptAttention,
    queries: QueryPredictions,
    boxes: dict[int, Sequence[int]],
    strides: Sequence[int],
    path: str | Path,
) -> None:
    """Save a PNG of where words look in the last fusion layer: a row for each word, a column for each map; if there is
    only one map, a row for each phrase, a column for each word.

    Args:
        image: (H, W, 3) uint8 RGB.
        boxes: the phrases whose words are drawn, and the queries of each that are framed.
        strides: the stride of each map.
        path: the PNG's path; its folder is made.
    """
    rows = []
    for phrase, of_phrase in boxes.items():
        boxes_xyxy = queries.boxes_xyxy[list(of_phrase)].tolist()
        first, words = Panel("" if rows else "image", boxes_xyxy=boxes_xyxy), attention.words_of(phrase)
        if len(attention.looks) == 1:
            (x,) = attention.looks
            panels = [Panel(attention.words[k], x.maps[k], x.covered, boxes_xyxy=boxes_xyxy) for k in words]
            rows.append((attention.phrases[phrase], [first, *panels]))
            continue
        for word in words:
            panels = [
                Panel("" if rows else f"stride {stride}", x.maps[word], x.covered, boxes_xyxy=boxes_xyxy)
                for stride, x in zip(strides, attention.looks)
            ]
            rows.append((attention.words[word], [first, *panels]))
            first = None
    layer = attention.looks[0].layer
    title = f"Where words look, fusion layer {layer}, mean of heads (full color: maximum); boxes: of their phrase"
    draw_rows(image, rows, path, title=title)
