"""Attention of a text-prompted detector: of queries to the prompt's words, and of words to the image."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.apps.explanations.images import LayerAttention, View, attention_layers, record
from vitkit.apps.inference.predictor import Predictor
from vitkit.nn.attention import AttentionRecorder
from vitkit.text.vocabulary import SPACE

MAX_GRID = 28
"""The most locations along the longer side of the map that a page shows what locations read of, if one is as small."""


@dataclass(frozen=True)
class PromptAttention:
    """The attention between the queries of one image, the words of a prompt, and the image."""

    words: Sequence[str]
    """The W words, as the model reads them."""
    phrases: Sequence[str]
    """The P phrases, the classes of what is detected."""
    phrase_of: Tensor
    """(W,) int64, the number of each word's phrase; -1 for a word of none, such as a separator."""
    reads: Tensor
    """(layers, heads, Q, W), what queries attend to in the prompt; no layers if only locations attend to it."""
    probabilities: Tensor
    """(Q, W), the probability of each word."""
    scores: Tensor
    """(Q, P), the score of each phrase."""
    looks: Sequence[LayerAttention]
    """What words attend to in each of the neck's maps, fine to coarse; empty if they do not attend to the image."""
    located: LayerAttention | None
    """The map of `looks` whose locations' attention to the words is in `location_reads`; None without one."""
    location_reads: Tensor | None
    """(heads, h * w, W), what the locations of that map attend to in the prompt."""

    def on_phrase(self, query: int, phrase: int) -> float:
        """Return the fraction of a query's attention in the last layer that is on a phrase's words."""
        return float(self.reads[-1, :, query][:, self.phrase_of == phrase].sum(-1).mean())

    def read_per_word(self, query: int, phrase: int) -> float:
        """Return the mean fraction of a query's attention in the last layer that one of a phrase's words gets."""
        return self.on_phrase(query, phrase) / len(self.words_of(phrase))

    def most_read(self, query: int) -> int:
        """Return the phrase whose words a query attends to most in the last layer, by the mean of a phrase's words."""
        return max(range(len(self.phrases)), key=lambda phrase: self.read_per_word(query, phrase))

    def ratio(self, word: int, region: Tensor) -> float:
        """Return a word's attention in a region of the image, (H, W) bool, relative to uniform attention."""
        return sum(float((x.ratios(word, region) * x.heads[:, word].sum((-2, -1))).mean()) for x in self.looks)

    def words_of(self, phrase: int) -> list[int]:
        """Return the indices of a phrase's words."""
        return (self.phrase_of == phrase).nonzero()[:, 0].tolist()


def prompt_attention(predictor: Predictor, image: np.ndarray) -> tuple[PromptAttention, View]:
    """Run a model that takes a prompt on an image (H, W, 3) uint8 RGB."""
    layers = attention_layers(predictor.model)
    recorded = nn.ModuleDict({str(i): module for i, module in enumerate(layers.prompt)})
    if layers.fusion:  # only the last one: each has a weight for each pair of a location and a word
        recorded["fusion"] = layers.fusion[-1]
    view = record(predictor, image, AttentionRecorder(recorded))
    scores, reading = view.class_scores(), predictor.encoded_text().reading
    words = [word.replace(SPACE, "") for word in reading.words]
    probabilities = view.outputs["pred_logits"][0].float().sigmoid().cpu()
    of_layers = [view.records[str(i)][0][0].float().cpu() for i in range(len(layers.prompt))]
    reads = [weights for weights in of_layers if weights.shape[1] == len(probabilities)]
    looks, located, location_reads = [], None, None
    if layers.fusion:
        to_words, to_locations = (weights[0].float().cpu() for weights in view.records["fusion"])
        ends = list(accumulate(height * width for height, width in view.feature_sizes.values()))
        for (name, size), end in zip(view.feature_sizes.items(), ends):
            part = slice(end - size[0] * size[1], end)
            maps = to_locations[..., part].unflatten(-1, size)
            looks.append(LayerAttention(len(layers.fusion) - 1, maps, view.compute_covered_at(name)))
            if located is None or max(located.heads.shape[-2:]) > MAX_GRID:
                located, location_reads = looks[-1], to_words[:, part]
    return PromptAttention(
        words,
        predictor.classes,
        torch.tensor(reading.phrase_of),
        torch.stack(reads) if reads else torch.empty(0, 1, *probabilities.shape),
        probabilities,
        scores,
        looks,
        located,
        location_reads,
    ), view
