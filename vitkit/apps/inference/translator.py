"""A trained translator: text in, text out."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.apps.inference.inputs import make_batches
from vitkit.apps.inference.words import aligned_spans, attention_of_words, join_words
from vitkit.data.text.datasets import pad_tokens
from vitkit.errors import DataError
from vitkit.seq2seq.decoding import DecodingSettings, Hypothesis, decode
from vitkit.structures import EOS, PAD
from vitkit.text.vocabulary import Vocabulary
from vitkit.weights import LoadReport

logger = logging.getLogger("vitkit")
BATCH = 32
"""The default number of sentences in a batch."""


@dataclass
class Translation:
    """A model's translation of one sentence."""

    source: str
    text: str
    score: float
    """The score of the best translation, see `DecodingSettings`."""
    n_best: list[tuple[float, str]]
    """Score and text of the requested number of translations, the best first."""

    def __str__(self) -> str:
        return self.text


class Alignment(NamedTuple):
    """The attention of each token of a translation to its source; the fields are the arguments of `draw_alignment`."""

    attention: Tensor
    """(T, S) in 0..1; for a Transformer the mean over the heads of the second-to-last layer, see `TextDecoder.step`."""
    source_tokens: list[str]
    """The S source tokens, including the end of the sentence."""
    target_tokens: list[str]
    """The T tokens of the translation."""

    def by_word(self) -> "Alignment":
        """Return the alignment of words, each joined from its tokens; a word that translates several source words is
        left in parts, see `aligned_spans`."""
        attention, source, target = self
        each = [slice(i, i + 1) for i in range(len(target))]
        spans = aligned_spans(attention_of_words(attention, target, source, spans=each), target)
        joined = attention_of_words(attention, target, source, spans=spans)
        return Alignment(joined, join_words(source), join_words(target, spans))


class TextModel:
    """Base of models of text that are ready to use; made by `load`.

    Args:
        model: the model, on its device.
        vocabularies: "target" -> the vocabulary of the text that it writes; "source" -> of the text that it translates.
        report: the report of loading the weights.
    """

    def __init__(self, model: nn.Module, vocabularies: Mapping[str, Vocabulary], *, report: LoadReport | None = None):
        self.model: Any = model.eval()  # of any kind: its subclasses say what they call
        self.vocabularies = dict(vocabularies)
        self.report = report
        self.device = next(model.parameters()).device

    @staticmethod
    def _check(texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts.

        Raises:
            DataError: an item is not text.
        """
        for text in texts if isinstance(texts, Iterable) else [texts]:
            if not isinstance(text, str):
                raise DataError(f"got {type(text).__name__}; the model expects text, or a list of texts.")
            yield text


def adapt_to_hypotheses(settings: DecodingSettings, n_best: int = 1, *, beams: int | None = None) -> DecodingSettings:
    """Return settings for `n_best` hypotheses per source, with beam search in place of greedy decoding if needed.

    Args:
        beams: number of beams, 1 for greedy decoding; None: at least as many as hypotheses.
    Raises:
        ConfigError: there are more hypotheses than beams.
    """
    method = "beam" if settings.method == "greedy" and n_best > 1 else settings.method
    if beams is not None:
        method = "greedy" if beams == 1 else "beam"
    beams = max(settings.beams, n_best) if beams is None else beams
    return replace(settings, method=method, beams=beams, n_best=n_best)


class Translator(TextModel):
    """A translation model with its vocabularies."""

    def __call__(
        self, source: str | Iterable[str], *, beams: int | None = None, n_best: int = 1, batch_size: int = BATCH
    ) -> Translation | list[Translation] | Iterator[Translation]:
        """Translate a sentence, a list of sentences, or those of a generator.

        Args:
            source: one sentence or several.
            beams: number of beams of beam search; None: as the model's config says.
            n_best: number of translations of each sentence.
            batch_size: number of sentences in a batch.
        Returns:
            one `Translation`, a list of them, or an iterator that translates as it goes.
        Raises:
            DataError: an item is not text.
        """
        if isinstance(source, str):
            return next(self.stream([source], beams=beams, n_best=n_best, batch_size=batch_size))
        if not isinstance(source, Iterable):
            raise DataError(f"got {type(source).__name__}; the model expects text, or a list of texts.")
        translations = self.stream(source, beams=beams, n_best=n_best, batch_size=batch_size)
        return list(translations) if isinstance(source, Sequence) else translations

    def predict(self, source: str | Iterable[str], **options: Any) -> list[Translation]:
        """Translate like `__call__`, but always return a list."""
        return list(self.stream([source] if isinstance(source, str) else source, **options))

    def stream(
        self, source: Iterable[str], *, beams: int | None = None, n_best: int = 1, batch_size: int = BATCH
    ) -> Iterator[Translation]:
        """Translate sentences a batch at a time; see `__call__`."""
        settings = adapt_to_hypotheses(self.model.decoding, n_best, beams=beams)
        target = self.vocabularies["target"]
        texts, to_encode = tee(self._check(source))
        encoded = map(self._encode, to_encode)
        for text, (_, hypotheses) in zip(texts, translate(self.model, encoded, settings, batch_size=batch_size)):
            best = [(hypothesis.score, target.decode(hypothesis.tokens)) for hypothesis in hypotheses]
            score, translation = best[0] if best else (0.0, "")
            yield Translation(text, translation, score, best)

    def _encode(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, and warn once of each unknown token."""
        source = self.vocabularies["source"]
        num_unknown = len(source.unknown)
        ids = source.encode(text)
        if len(source.unknown) > num_unknown:
            new = ", ".join(map(repr, list(source.unknown)[num_unknown:]))
            logger.warning("%.60r: not in the vocabulary, and translated as unknown: %.200s", text, new)
        return ids

    def align(self, text: str, *, words: bool = False) -> Alignment:
        """Translate a sentence, and return what each token of the best translation attended to.

        Args:
            words: join the tokens to words.
        Raises:
            ConfigError: the model has no attention from its output to the source.
            DataError: the text has no tokens.
        """
        source, target = self.vocabularies["source"], self.vocabularies["target"]
        ids = self._encode(text)
        hypotheses = next(translate(self.model, [ids], self.model.decoding, attention=True))[1]
        if not hypotheses:
            raise DataError("align: no token in the text. Give a sentence.")
        best = hypotheses[0]
        assert best.attention is not None
        alignment = Alignment(best.attention, source.token_texts([*ids, EOS]), target.token_texts(best.tokens))
        return alignment.by_word() if words and best.tokens else alignment


def translate(
    model: Any,
    encoded: Iterable[list[int]],
    settings: DecodingSettings,
    *,
    attention: bool = False,
    batch_size: int = BATCH,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Yield the index and the translations, best first, of each line in order; an empty line has none.

    Args:
        model: in evaluation mode.
        encoded: token ids of each line, without EOS.
        settings: the decoding settings.
        attention: whether hypotheses include their attention.
        batch_size: number of lines in a batch.
    """
    device = next(model.parameters()).device
    for batch in make_batches(enumerate(encoded), batch_size):
        start = batch[0][0]
        non_empty = {row: ids for row, ids in batch if ids}
        translations = {}
        if non_empty:
            source = pad_tokens([torch.tensor([*ids, EOS]) for ids in non_empty.values()]).to(device)
            inputs = {"source": source, "source_padding": source == PAD}
            # Each batch samples with different seeds.
            batch_settings = replace(settings, seed=settings.seed + start * settings.n_best)
            hypotheses = decode(model, inputs, batch_settings, return_attention=attention)
            translations = dict(zip(non_empty, hypotheses))
        for row, _ in batch:
            yield row, translations.get(row, [])
