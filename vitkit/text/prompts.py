"""Prompts of text-prompted models: from phrases to tokens.

A prompt is a list of phrases, or one text in which dots separate them: "a red star . a cat ." Each phrase is tokenized
on its own, so it is known which tokens are whose: [CLS] a red star . a cat . [SEP]. A prompt always ends with a dot.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.errors import ConfigError, DataError
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.vocabulary import Vocabulary, normalize_text

logger = logging.getLogger("vitkit")

MAX_TOKENS = 256
"""The largest number of tokens of a prompt, the first and the last included, that published models are trained on."""
SEPARATOR = "."
_ENDS = (".", "?")
"""Characters at which the originals end a phrase."""

Prompt = str | Sequence[str]
"""A text of phrases that dots separate, or the phrases."""


class EncodedPrompt(NamedTuple):
    """The tokens of one prompt; fields as in `vitkit.ops.prompts`."""

    tokens: list[int]
    blocks: list[int]
    is_word: list[bool]


def split_phrases(prompt: Prompt) -> list[str]:
    """Return the phrases of a prompt, with single spaces.

    Raises:
        DataError: there is no phrase, one is empty, ends within itself, or is there twice.
    """
    parts = prompt.split(SEPARATOR) if isinstance(prompt, str) else list(prompt)
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"prompt: got {prompt!r:.100}; expected a text such as 'cat . dog .', or a list of phrases.")
    phrases = [normalize_text(part) for part in parts]
    if isinstance(prompt, str):
        phrases = [phrase for phrase in phrases if phrase]
    if not phrases or not all(phrases):
        what = "no phrase" if not any(phrases) else f"an empty phrase (number {phrases.index('') + 1})"
        raise DataError(f"prompt: {prompt!r:.100} has {what}; expected at least one word in each, as in 'cat . dog .'.")
    for phrase in phrases:
        if mark := next((mark for mark in _ENDS if mark in phrase), None):
            raise DataError(
                f"prompt: the phrase {phrase!r} has a {mark!r}, where the model takes it to end. Write it without."
            )
    folded = [phrase.lower() for phrase in phrases]
    for index, phrase in enumerate(folded):
        if phrase in folded[:index]:
            raise DataError(f"prompt: the phrase {phrases[index]!r} is given twice; expected each phrase once.")
    return phrases


def encode_phrases(
    vocabulary: Vocabulary, phrases: Iterable[str], *, max_tokens: int | None = MAX_TOKENS
) -> EncodedPrompt:
    """Return the tokens of phrases, as from `split_phrases`.

    Args:
        max_tokens: the largest number of tokens; None: any.
    Raises:
        ConfigError: the vocabulary has no separator.
        DataError: a phrase has only unknown pieces, or there are more tokens than `max_tokens`.
    """
    phrases, numbers = list(phrases), vocabulary.numbers
    separator, *encoded = vocabulary.encode_all([SEPARATOR, *phrases])
    if len(separator) != 1 or UNK in separator:
        raise ConfigError(f"prompt: the vocabulary has no {SEPARATOR!r}, which separates phrases. Train it with one.")
    if numbers[PAD] != 0:
        raise ConfigError(f"prompt: padding is token {numbers[PAD]} of the vocabulary; expected 0, as in BERT's.")
    tokens, blocks, is_word = [numbers[BOS]], [-1], [False]
    for block, (phrase, ids) in enumerate(zip(phrases, encoded)):
        if not ids or set(ids) == {UNK}:
            raise DataError(f"prompt: the tokenizer knows no piece of the phrase {phrase!r}. Use words that it knows.")
        _warn_of_letters(vocabulary, phrase, ids)
        tokens += [numbers[index] for index in (*ids, *separator)]
        blocks += [block] * (len(ids) + 1)
        is_word += [True] * len(ids) + [False]
    tokens, blocks, is_word = [*tokens, numbers[EOS]], [*blocks, -1], [*is_word, False]
    if max_tokens is not None and len(tokens) > max_tokens:
        raise DataError(
            f"prompt: {len(phrases)} phrases have {len(tokens)} tokens; the model takes {max_tokens}. Give fewer "
            "phrases at a time."
        )
    return EncodedPrompt(tokens, blocks, is_word)


def join_prompts(prompts: Sequence[EncodedPrompt]) -> EncodedPrompt:
    """Return the prompt of the phrases of several, of at least one."""
    tokens, blocks, is_word = prompts[0].tokens[:1], [-1], [False]
    for prompt in prompts:
        first = blocks[-1] + 1
        tokens += prompt.tokens[1:-1]
        blocks += [first + block for block in prompt.blocks[1:-1]]
        is_word += prompt.is_word[1:-1]
    return EncodedPrompt([*tokens, *prompts[0].tokens[-1:]], [*blocks, -1], [*is_word, False])


def spanned_tokens(vocabulary: Vocabulary, phrase: str, spans: Iterable[tuple[int, int]]) -> list[bool]:
    """Return which tokens of a phrase have a character in one of the spans, [begin, end) of the text as it is given."""

    def normalized(index: int) -> int:
        return len(normalize_text(f"{phrase[:index]}|")) - 1

    ranges = [(normalized(begin), normalized(end)) for begin, end in spans]
    return [
        any(begin < token_end and token_begin < end for begin, end in ranges)
        for token_begin, token_end in vocabulary.token_spans(phrase)
    ]


def _warn_of_letters(vocabulary: Vocabulary, phrase: str, ids: Sequence[int]) -> None:
    """Warn of a phrase in another script than the vocabulary's, which it splits into letters that mean nothing."""
    words = re.findall(r"[^\W\d_]{3,}", phrase)
    foreign = [word for word in words if not word.isascii()]
    if vocabulary.kind == "tokenizer" and foreign == words and words and len(ids) >= len(re.sub(r"\s", "", phrase)):
        logger.warning(
            "prompt: the tokenizer splits the phrase %r into single letters, as of a language that it does not know: "
            "expect no useful detections. Write it in the model's language.",
            phrase,
        )


def collate_prompts(prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """Return the prompts of a batch, padded to the longest: `tokens`, `blocks` and `is_word`, (B, T)."""
    length = max(len(prompt.tokens) for prompt in prompts)

    def padded(name: str, value: int | bool) -> Tensor:
        rows = [getattr(prompt, name) for prompt in prompts]
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])

    return {"tokens": padded("tokens", PAD), "blocks": padded("blocks", -1), "is_word": padded("is_word", False)}
