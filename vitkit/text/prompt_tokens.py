"""Prompts as tensors: which tokens form a phrase, which of them see each other, and where they stand in it.

A prompt is a list of phrases, each of which ends with a separator: "[CLS] a cat . dog . [SEP]". Its tokens have
    blocks: (B, S) int64, the number of each token's phrase, counted from 0; -1 for tokens outside of phrases: the first
        and the last token, and padding. The separator belongs to its phrase.
    is_word: (B, S) bool, whether a token is one of its phrase's own, and not its separator.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import DataError
from vitkit.structures import PAD


class PromptLayout(NamedTuple):
    """How the tokens of prompts relate to each other."""

    masked: Tensor
    """(B, S, S) bool, True = the token of the row must not see that of the column: a token sees those of its phrase,
    one outside of phrases only itself."""
    positions: Tensor
    """(B, S) int64, the place of a token in its phrase, counted from 0; 0 outside of phrases."""


def prompt_layout(blocks: Tensor) -> PromptLayout:
    """Return the mask and the positions of prompts, (B, S), which depend on no other prompt in the batch."""
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, None, :]
    index = torch.arange(blocks.shape[1], device=blocks.device)
    positions = (same & (index < index[:, None])).sum(-1)
    return PromptLayout(masked=~(same | (index == index[:, None])), positions=positions)


def phrase_tokens(blocks: Tensor, is_word: Tensor, phrases: Tensor) -> Tensor:
    """Return which tokens are those of each phrase.

    Args:
        blocks, is_word: (..., S).
        phrases: (..., P) int64, numbers of phrases.
    Returns:
        (..., P, S) bool.
    """
    return (blocks[..., None, :] == phrases[..., None]) & is_word[..., None, :]


def words_and_padding(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return `is_word`, and which tokens are padding, (B, S) bool, of prompts whose phrases end with a separator."""
    is_inside = blocks >= 0
    index = torch.arange(blocks.shape[1], device=blocks.device)
    end = (index * is_inside).amax(1, keepdim=True) + 1  # the last token, after the last separator
    following = F.pad(blocks[:, 1:], (0, 1), value=-1)
    return is_inside & (following == blocks), index > end


class PromptPart(NamedTuple):
    """Consecutive phrases of each prompt of a batch, as prompts of their own; of a prompt that has no more, only its
    ends."""

    tokens: Tensor
    """(B, T), padded to the longest."""
    blocks: Tensor
    """(B, T), counted from the part's first phrase."""
    is_word: Tensor
    """(B, T)."""
    first_phrase: Tensor
    """(B,) int64, the number of the part's first phrase in its prompt."""


def split_prompts(
    tokens: Tensor, blocks: Tensor, is_word: Tensor, *, max_tokens: int, max_phrases: int | None = None
) -> list[PromptPart]:
    """Split prompts, (B, S), between phrases into as few parts as hold them.

    Args:
        tokens: (B, S) int64 of which `PAD` is padding.
        max_tokens: the largest number of tokens of a part, its first and last included.
        max_phrases: the largest number of its phrases; None: any.
    Raises:
        DataError: a single phrase has too many tokens.
    """
    count, capacity = blocks.amax(1, keepdim=True) + 1, max_tokens - 2
    lengths = torch.zeros(len(blocks), int(count.max()) + 1, dtype=torch.int64, device=blocks.device)
    lengths = lengths.scatter_add_(1, blocks + 1, torch.ones_like(blocks))[:, 1:]  # of tokens outside of phrases first
    if (lengths > capacity).any():
        _, phrase = (lengths > capacity).nonzero()[0].tolist()
        raise DataError(
            f"text: phrase {phrase + 1} has {int(lengths[:, phrase].max())} tokens, and the model takes {capacity} in "
            "a phrase. Shorten it."
        )
    ends = lengths.cumsum(1)
    first, parts = torch.zeros_like(count), []
    while (first < count).any():
        before = F.pad(ends, (1, 0)).gather(1, first)
        last = torch.searchsorted(ends, before + capacity, right=True).minimum(count)
        if max_phrases is not None:
            last = last.minimum(first + max_phrases)
        kept = ((blocks >= first) & (blocks < last)) | ((blocks < 0) & (tokens != PAD))
        order = (~kept).long().argsort(dim=1, stable=True)[:, : int(kept.sum(1).max())]
        fields = (tokens.where(kept, PAD), (blocks - first).where(kept & (blocks >= 0), -1), is_word & kept)
        parts.append(PromptPart(*(field.gather(1, order) for field in fields), first[:, 0]))
        first = last
    return parts
