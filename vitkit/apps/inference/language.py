"""Trained language models: decoder-only ones continue text, encoder-only ones fill masks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitkit.apps.inference.inputs import make_batches
from vitkit.apps.inference.translator import BATCH, TextModel
from vitkit.data.text.datasets import pad_tokens
from vitkit.errors import ConfigError, DataError
from vitkit.registry import check_names
from vitkit.seq2seq.decoding import DecodingSettings, decode
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.vocabulary import MASK_TOKEN, SPACE, Vocabulary


@dataclass
class Continuation:
    """A model's continuation of a prompt."""

    prompt: str
    text: str
    """The prompt and its continuation."""
    score: float
    """The score of the continuation, see `Hypothesis`."""

    def __str__(self) -> str:
        return self.text


class LanguageModel(TextModel):
    """Base of language models, which only have the vocabulary "target"."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the text."""
        return self.vocabularies["target"]

    def _check_length(self, ids: Sequence[int], number: int) -> int:
        """Return the number of positions that the model has.

        Raises:
            DataError: text `number` has more tokens than that.
        """
        limit = len(self.model.positions.codes)
        if len(ids) > limit:
            raise DataError(
                f"text {number}: {len(ids)} tokens, including its beginning or end; expected at most {limit}, the "
                "number of positions that the model has (model.max_length). Shorten the text."
            )
        return limit


class TextContinuer(LanguageModel):
    """Continues text with a decoder-only model (CausalLanguageModel)."""

    def __call__(
        self, prompt: str | Iterable[str], *, decoding: Mapping[str, Any] | DecodingSettings | None = None
    ) -> list[Continuation] | list[list[Continuation]]:
        """Continue a text, or several.

        Args:
            prompt: the beginning of a text, which may be empty; or several.
            decoding: fields of `DecodingSettings` by name, which override those of the model's config; or all settings.
        Returns:
            the `n_best` continuations, the best first; for several prompts, one list for each.
        Raises:
            ConfigError: a setting is wrong.
            DataError: a prompt is not text, or has more tokens than the model has positions.
        """
        if isinstance(decoding, DecodingSettings):
            settings = decoding
        else:
            check_names(DecodingSettings, decoding or {}, "decoding")
            settings = replace(self.model.decoding, **(decoding or {}))
        if isinstance(prompt, str):
            return next(self.stream([prompt], settings))
        return list(self.stream(prompt, settings))

    def stream(
        self, prompts: Iterable[str], settings: DecodingSettings, *, batch_size: int = BATCH
    ) -> Iterator[list[Continuation]]:
        """Continue texts a batch at a time; see `__call__`. A text ends at the latest at the model's last position."""
        number = 0
        for texts in make_batches(self._check(prompts), batch_size):
            encoded = [[BOS, *ids] for ids in self.vocabulary.encode_all(texts)]
            rooms = [self._check_length(ids, number + k) - len(ids) + 1 for k, ids in enumerate(encoded, start=1)]
            # A text with room for fewer tokens must not shorten the others in its batch.
            size = batch_size if min(rooms) >= settings.max_length else 1
            for start in range(0, len(texts), size):
                rows = slice(start, start + size)
                longest = min(settings.max_length, *rooms[rows])
                batch_settings = replace(
                    settings,
                    seed=settings.seed + (number + start) * settings.n_best,  # each text samples with its own seeds
                    max_length=longest,
                    min_length=min(settings.min_length, max(0, longest - 1)),
                )
                yield from self._continue(texts[rows], encoded[rows], batch_settings)
            number += len(texts)

    def _continue(
        self, texts: Sequence[str], encoded: Sequence[Sequence[int]], settings: DecodingSettings
    ) -> Iterator[list[Continuation]]:
        tokens = pad_tokens([torch.tensor(ids) for ids in encoded]).to(self.device)
        decoded = decode(self.model, {"tokens": tokens, "padding_mask": tokens == PAD}, settings)
        for text, ids, hypotheses in zip(texts, encoded, decoded):
            prompt_length = len(self.vocabulary.decode(ids))
            whole = [self.vocabulary.decode([*ids, *hypothesis.tokens]) for hypothesis in hypotheses]
            # The prompt is returned as written, since decoding its tokens would lose characters not in the vocabulary.
            yield [Continuation(text, text.rstrip() + w[prompt_length:], h.score) for w, h in zip(whole, hypotheses)]


@dataclass
class Filling:
    """A candidate token for a mask."""

    token: str
    """The token as readable text, without the space before a word."""
    probability: float
    text: str
    """The text with this token in place of the mask; other masks stay."""


class MaskFiller(LanguageModel):
    """Fills masks with an encoder-only model (MaskedLanguageModel)."""

    def __call__(
        self, text: str | Iterable[str], *, n_best: int = 5
    ) -> list[list[Filling]] | list[list[list[Filling]]]:
        """Find the most probable tokens at the masks of a text, or of several.

        Args:
            text: a text with MASK_TOKEN ("<mask>") for each hidden token; or several.
            n_best: number of candidates for each mask.
        Returns:
            for each mask its candidates, the most probable first; for several texts, one such list for each.
        Raises:
            ConfigError: n_best is below 1.
            DataError: an item is not text, has no mask, or has more tokens than the model has positions.
        """
        if isinstance(text, str):
            return next(self.stream([text], n_best=n_best))
        return list(self.stream(text, n_best=n_best))

    def stream(self, texts: Iterable[str], *, n_best: int = 5) -> Iterator[list[list[Filling]]]:
        """Fill texts one by one; see `__call__`."""
        if n_best < 1:
            raise ConfigError(f"n_best: got {n_best}; expected at least 1.")
        return (self._fill(text, number, n_best) for number, text in enumerate(self._check(texts), start=1))

    @torch.no_grad()
    def _fill(self, text: str, number: int, n_best: int) -> list[list[Filling]]:
        ids = [*self.vocabulary.encode_masked(text), EOS]
        if self.model.mask_id not in ids:
            raise DataError(f"text {number}: {text!r:.100} has no mask. Write {MASK_TOKEN} for each hidden token.")
        self._check_length(ids, number)
        tokens = torch.tensor([ids], device=self.device)
        probabilities = self.model.predict(tokens)[0, tokens[0] == self.model.mask_id].float().softmax(dim=-1)
        special = [PAD, UNK, BOS, EOS, self.model.mask_id]  # never candidates
        probabilities[:, special] = 0
        count = min(n_best, probabilities.shape[1] - len(special))
        return [self._fillings(text, mask, row, count) for mask, row in enumerate(probabilities)]

    def _fillings(self, text: str, mask: int, probabilities: Tensor, count: int) -> list[Filling]:
        parts = text.split(MASK_TOKEN)
        before, after = MASK_TOKEN.join(parts[: mask + 1]), MASK_TOKEN.join(parts[mask + 1 :])
        values, ids = probabilities.topk(count)
        fillings = []
        for value, token in zip(values.tolist(), self.vocabulary.token_texts(ids.tolist())):
            # Tokens that begin a word include the space before it; characters do not.
            start = before if self.vocabulary.kind == "char" else before.rstrip()
            joined = (start + token.replace(SPACE, " ")).lstrip()
            fillings.append(Filling(token.replace(SPACE, ""), value, joined + after))
        return fillings
