"""Convert tokens to words, and attention among tokens to attention among words."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkit.text.vocabulary import MASK_TOKEN, SPACE, SPECIAL_TOKENS

_ALONE = {*SPECIAL_TOKENS, MASK_TOKEN}


def word_spans(tokens: Sequence[str]) -> list[slice]:
    """Group the tokens of a text into words, at spaces and between letters and punctuation.

    Args:
        tokens: as from `Vocabulary.token_texts`; each special token is a word by itself.
    Returns:
        for each word the slice of its tokens, in order.
    """
    spans: list[slice] = []
    for i, token in enumerate(tokens):
        before = tokens[i - 1] if i else ""
        if spans and not _begins_word(before, token):
            spans[-1] = slice(spans[-1].start, i + 1)
        else:
            spans.append(slice(i, i + 1))
    return spans


def _begins_word(before: str, token: str) -> bool:
    if token.startswith(SPACE) or _ALONE & {before, token}:
        return True
    # A space may be a token by itself, which belongs to the word after it.
    end, start = before.strip(SPACE)[-1:], token[:1]
    return bool(end) and end.isalnum() != start.isalnum()


def join_words(tokens: Sequence[str], spans: Sequence[slice] | None = None) -> list[str]:
    """Return the words of `word_spans`, or others given by the slices of their tokens, as text, without SPACE."""
    spans = word_spans(tokens) if spans is None else spans
    return ["".join(tokens[span]).replace(SPACE, "") for span in spans]


def aligned_spans(weights: Tensor, tokens: Sequence[str]) -> list[slice]:
    """Group the tokens of a translation into words, and into parts of words that translate several words.

    A compound such as "einundzwanzig" attends to each word that it translates in turn, so the mean over its tokens says
    nothing. Where no source word gets half of that mean, the parts are tokens that attend most to the same source word.

    Args:
        weights: (L, S) attention to the words of the source.
        tokens: the L tokens of the translation.
    """
    spans: list[slice] = []
    for word in word_spans(tokens):
        spans.append(slice(word.start, word.start + 1))
        is_whole = bool(weights[word].mean(0).max() >= 0.5)
        for i in range(word.start + 1, word.stop):
            # A space may be a token by itself.
            if is_whole or tokens[i - 1] == SPACE or weights[i].argmax() == weights[i - 1].argmax():
                spans[-1] = slice(spans[-1].start, i + 1)
            else:
                spans.append(slice(i, i + 1))
    return spans


def attention_of_words(
    weights: Tensor, rows: Sequence[str], columns: Sequence[str], *, spans: Sequence[slice] | None = None
) -> Tensor:
    """Return attention among words from that among tokens: what a word's tokens attend to on average, and what all
    tokens of the attended word get together, so that rows still sum to 1.

    Args:
        weights: (..., L, S).
        rows: the L tokens that attend.
        columns: the S tokens that are attended to.
        spans: the slices of the rows' words; None: see `word_spans`.
    Returns:
        (..., words of rows, words of columns).
    """
    weights = torch.cat([weights[..., span].sum(-1, keepdim=True) for span in word_spans(columns)], dim=-1)
    spans = word_spans(rows) if spans is None else spans
    return torch.cat([weights[..., span, :].mean(-2, keepdim=True) for span in spans], dim=-2)
