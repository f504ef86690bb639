"""Attention of text models head by head, the next tokens that they expect, and the beams that they follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitkit.apps.explanations.text_drawing import draw_beams
from vitkit.apps.inference.words import attention_of_words, join_words
from vitkit.nn.attention import AttentionRecorder
from vitkit.seq2seq.captioner import Captioner
from vitkit.seq2seq.decoding import Decodable, DecodingSettings, State, TextGenerator, decode
from vitkit.structures import BOS, EOS
from vitkit.text.vocabulary import SPACE, Vocabulary


class TextLayer(NamedTuple):
    """The attention of one layer among tokens."""

    kind: str
    """"encoder", "decoder" (self-attention) or "cross" (from the written tokens to the source's)."""
    number: int
    weights: Tensor
    """(heads, L, S) float32."""
    rows: Sequence[str]
    """The L tokens that attend; for "cross" those that the decoder writes, one step after it reads them."""
    columns: Sequence[str]
    """The S tokens that are attended to."""

    def by_word(self) -> "TextLayer":
        """Return the attention among words, each joined from its tokens; see `attention_of_words`."""
        weights = attention_of_words(self.weights, self.rows, self.columns) if self.rows else self.weights
        return self._replace(weights=weights, rows=join_words(self.rows), columns=join_words(self.columns))


class Expected(NamedTuple):
    """The most probable next tokens at one step."""

    after: str
    """The previous token; for a masked language model the token at this step."""
    tokens: Sequence[str]
    """The most probable tokens, in descending order."""
    probabilities: Sequence[float]


@dataclass(frozen=True)
class TextAttention:
    """The attention of a model in one sentence, and the tokens that it expected."""

    layers: Sequence[TextLayer]
    expected: Sequence[Expected]

    def of_kind(self, kind: str) -> list[TextLayer]:
        """Return the layers of a kind, first to last."""
        return [layer for layer in self.layers if layer.kind == kind]


def text_inputs(model: nn.Module, vocabularies: Mapping[str, Vocabulary], text: str) -> dict[str, Tensor]:
    """Return a batch of one sentence: the source of a translation model, or the prompt of a decoder-only one."""
    device = next(model.parameters()).device
    if "tokens" in model.takes:
        return {"tokens": torch.tensor([[BOS, *vocabularies["target"].encode(text)]], device=device)}
    source = torch.tensor([[*vocabularies["source"].encode(text), EOS]], device=device)
    return {"source": source, "source_padding": torch.zeros_like(source, dtype=torch.bool)}


@torch.no_grad()
def text_attention(
    model: nn.Module, vocabularies: Mapping[str, Vocabulary], text: str, *, num_expected: int = 5, words: bool = False
) -> TextAttention:
    """Run a model on a sentence; a translation model first decodes its output greedily.

    Args:
        model: in evaluation mode.
        vocabularies: the model's vocabularies.
        text: the input sentence; for a masked language model with MASK_TOKEN for each hidden token, if there are any.
        num_expected: the number of most probable tokens for each step.
        words: join the tokens of the attention layers to words; what is expected at each step remains a token.
    """
    device, target = next(model.parameters()).device, vocabularies["target"]
    source: list[str] = []
    written: list[str] = []
    fills_masks = "masked_tokens" in model.returns
    if fills_masks:
        ids = [*target.encode_masked(text), EOS]  # as `MaskFiller` reads it
        # The model's `forward` would mask some of the tokens.
        predict = partial(model.predict, torch.tensor([ids], device=device))
    else:
        inputs = text_inputs(model, vocabularies, text)
        if "tokens" in model.takes:
            ids = inputs["tokens"][0].tolist()
        else:
            source = vocabularies["source"].token_texts(inputs["source"][0].tolist())
            ids = [BOS, *decode(model, inputs, replace(model.decoding, method="greedy", n_best=1))[0][0].tokens]
            # A translation that was cut off at the maximum length has no EOS.
            written = target.token_texts([*ids[1:], EOS][: model.decoding.max_length])
            inputs["target_in"] = torch.tensor([ids], device=device)

        def predict() -> Tensor:
            return model(**inputs)["logits"]

    with AttentionRecorder(model) as maps:
        logits = predict()
    expected = most_probable(logits[0], target, ids, num_expected)
    if fills_masks and model.class_token:
        ids = [BOS, *ids]
    tokens = [*(source if not fills_masks and model.joins_source else ()), *target.token_texts(ids)]
    layers = _layers(model, maps, tokens, source, written)
    return TextAttention([layer.by_word() for layer in layers] if words else layers, expected)


@torch.no_grad()
def caption_attention(model: Captioner, inputs: Mapping[str, Tensor], *, num_expected: int = 5) -> TextAttention:
    """Run a captioner on one image; return its decoder's self-attention and the tokens that it expects next.

    Args:
        inputs: the model's inputs, a batch of one.
        num_expected: the number of most probable tokens for each step.
    """
    ids = [BOS, *decode(model, inputs, replace(model.decoding, method="greedy", n_best=1))[0][0].tokens]
    target_in = torch.tensor([ids], device=next(model.parameters()).device)
    with AttentionRecorder(model) as maps:
        logits = model(target_in, **inputs)["logits"]
    layers = _layers(model, maps, model.vocabulary.token_texts(ids), (), ())
    expected = most_probable(logits[0], model.vocabulary, ids, num_expected)
    return TextAttention([layer for layer in layers if layer.kind == "decoder"], expected)


class WordAttention(NamedTuple):
    """A caption, and the model's attention in the image for each of its words."""

    words: Sequence[str]
    """The N tokens of the caption."""
    weights: Tensor
    """(N, h, w) attention of each token over the image's feature map; for hard attention the one sampled location."""


@torch.no_grad()
def word_attention(model: Captioner, inputs: Mapping[str, Tensor]) -> WordAttention:
    """Caption one image with the decoding settings of the model's config.

    Args:
        model: in evaluation mode.
        inputs: the model's inputs, a batch of one.
    """
    best = decode(model, inputs, model.decoding, return_attention=True)[0][0]
    words = [token.replace(SPACE, "") for token in model.vocabulary.token_texts(best.tokens)]
    size = model.look(inputs["images"], inputs["padding_mask"]).features.shape[-2:]
    return WordAttention(words, best.attention.unflatten(1, size))


def most_probable(logits: Tensor, vocabulary: Vocabulary, ids: Sequence[int], count: int) -> list[Expected]:
    """Return the `count` most probable tokens at each of T steps, from logits (T, V)."""
    best = logits.float().softmax(-1).topk(min(count, logits.shape[-1]))
    return [
        Expected(after, vocabulary.token_texts(tokens), [round(p, 4) for p in probabilities])
        for after, tokens, probabilities in zip(
            vocabulary.token_texts(ids), best.indices.tolist(), best.values.tolist()
        )
    ]


def _layers(
    model: nn.Module,
    maps: Mapping[str, list[Tensor]],
    tokens: Sequence[str],
    source: Sequence[str],
    written: Sequence[str],
) -> list[TextLayer]:
    """Return the recorded attention maps with the tokens of their rows and columns.

    Args:
        tokens: the tokens that the model, or its decoder, reads.
        source: the tokens that an encoder reads, if there is a decoder too.
        written: the tokens that the decoder writes, the rows of cross-attention.
    """
    is_encoder_only = "masked_tokens" in model.returns
    layers: list[TextLayer] = []
    for name, calls in maps.items():
        # A recurrent decoder calls its attention once for each token.
        weights = torch.cat(calls, dim=2)[0].float().cpu()
        if name.endswith("self_attn"):
            kind = "encoder" if name.startswith("encoder") else "decoder"
        else:
            kind = "cross"
            weights = weights[:, : len(written)]
        rows = {"encoder": tokens if is_encoder_only else source, "decoder": tokens, "cross": written}[kind]
        columns = source if kind != "decoder" and not is_encoder_only else tokens
        number = sum(layer.kind == kind for layer in layers)
        layers.append(TextLayer(kind, number, weights, rows, columns))
    return layers


class BeamNode(NamedTuple):
    """One token of a beam."""

    step: int
    """The step at which the token was decoded, counted from 1."""
    token: int
    parent: int | None
    """The index of the previous node in the list of all nodes; None at the beginning."""
    log_prob: float
    """The log probability, summed over the tokens so far."""
    is_best: bool
    """Whether the best hypothesis goes through this node."""


class _RecordedState(State):
    def __init__(self, state: State, selections: list[Tensor]):
        self.state, self.selections, self.tokens = state, selections, state.tokens

    def select(self, rows: Tensor) -> "_RecordedState":
        return self.select_beams(rows, beams=1, sources=None)

    def select_beams(self, rows: Tensor, *, beams: int, sources: Tensor | None) -> "_RecordedState":
        self.selections.append(rows.cpu())
        return _RecordedState(self.state.select_beams(rows, beams=beams, sources=sources), self.selections)


class _RecordedSteps:
    """A decodable model that records the tokens, the log probabilities and the parents of each step."""

    def __init__(self, model: Decodable):
        self.model, self.steps, self.selections = model, [], []

    def start(self, **inputs: Tensor) -> State:
        return _RecordedState(self.model.start(**inputs), self.selections)

    def step(self, tokens: Tensor, state: _RecordedState, *, with_attention: bool = False) -> tuple:
        logits, inner, attention = self.model.step(tokens, state.state, with_attention=with_attention)
        self.steps.append((tokens.cpu(), logits.float().log_softmax(-1).cpu()))
        return logits, _RecordedState(inner, self.selections), attention


def beam_tree(
    model: Decodable, inputs: Mapping[str, Tensor], settings: DecodingSettings, *, beams: int
) -> list[BeamNode]:
    """Return the tokens that beam search followed for one source, each after its parent.

    Args:
        inputs: the model's inputs, a batch of one.
        settings: the decoding settings.
        beams: number of beams, at least 2.
    """
    recorded = _RecordedSteps(model)
    hypotheses = decode(recorded, inputs, replace(settings, method="beam", beams=beams, n_best=beams))[0]
    best = hypotheses[0].tokens
    nodes: list[BeamNode] = []
    rows: list[int | None] = [None]  # the node that each row of the state ends with
    for step, (parents, (tokens, _)) in enumerate(zip(recorded.selections, recorded.steps[1:]), start=1):
        log_probs = recorded.steps[step - 1][1]
        fresh: list[int | None] = []
        for parent, token in zip(parents.tolist(), tokens.tolist()):
            before = rows[parent]
            total = float(log_probs[parent, token]) + (nodes[before].log_prob if before is not None else 0.0)
            on_best = before is None or nodes[before].is_best
            is_best = on_best and len(best) >= step and best[step - 1] == token
            nodes.append(BeamNode(step, token, before, total, is_best))
            fresh.append(len(nodes) - 1)
        rows = fresh
    position = {(node.parent, node.token): i for i, node in enumerate(nodes)}
    for number, hypothesis in enumerate(hypotheses):
        # The last token of each hypothesis is not recorded: its EOS, or the one at the length limit.
        *prefix, end = [*hypothesis.tokens, EOS][: settings.max_length]
        last = None
        for token in prefix:
            last = position.get((last, token))
        length = len(prefix) + 1
        nodes.append(BeamNode(length, end, last, hypothesis.score * settings.penalty(length), number == 0))
    return nodes


def draw_beam_tree(
    model: TextGenerator, vocabulary: Vocabulary, inputs: Mapping[str, Tensor], path: str | Path, *, beams: int = 4
) -> None:
    """Save a PNG of the beams as a tree.

    Args:
        model: in evaluation mode.
        vocabulary: the vocabulary of the text that it writes.
        inputs: the model's inputs, a batch of one, such as that of `text_inputs`.
        path: the PNG's path; its folder is made.
        beams: number of beams, at least 2.
    """
    nodes = beam_tree(model, inputs, model.decoding, beams=beams)
    texts = vocabulary.token_texts([node.token for node in nodes])
    tree = [(node.step, text, *node[2:]) for node, text in zip(nodes, texts)]
    prompt = inputs["tokens"][0].tolist() if "tokens" in inputs else [BOS]
    root = ("… " if len(prompt) > 2 else "") + vocabulary.token_texts(prompt[-1:])[0]
    draw_beams(
        tree, path, root=root, title=f"{beams} beams, with their summed log probability; green: the best hypothesis"
    )
