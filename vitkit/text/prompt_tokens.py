"""The layout of prompts: the tokens of each phrase, their attention mask and their positions."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import DataError
from vitkit.structures import PAD, PromptTokens


class PromptLayout(NamedTuple):
    """The attention mask and the positions of the tokens of prompts."""

    masked: Tensor
    """(B, S, S) bool, True = the token of the row must not see that of the column: a token sees those of its phrase,
    one outside of phrases only itself."""
    positions: Tensor
    """(B, S) int64, the place of a token in its phrase, counted from 0; 0 outside of phrases."""


def prompt_layout(phrase_ids: Tensor) -> PromptLayout:
    """Return the mask and the positions of prompts, (B, S), which depend on no other prompt in the batch."""
    same = (phrase_ids[:, :, None] == phrase_ids[:, None, :]) & (phrase_ids >= 0)[:, None, :]
    index = torch.arange(phrase_ids.shape[1], device=phrase_ids.device)
    positions = (same & (index < index[:, None])).sum(-1)
    return PromptLayout(masked=~(same | (index == index[:, None])), positions=positions)


def phrase_tokens(phrase_ids: Tensor, is_word: Tensor, phrases: Tensor) -> Tensor:
    """Return a mask of the tokens of each phrase.

    Args:
        phrase_ids, is_word: (..., S).
        phrases: (..., P) int64, numbers of phrases.
    Returns:
        (..., P, S) bool.
    """
    return (phrase_ids[..., None, :] == phrases[..., None]) & is_word[..., None, :]


def words_and_padding(phrase_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return `is_word`, and which tokens are padding, (B, S) bool, of prompts whose phrases end with a separator."""
    is_inside = phrase_ids >= 0
    index = torch.arange(phrase_ids.shape[1], device=phrase_ids.device)
    end = (index * is_inside).amax(1, keepdim=True) + 1  # the last token, after the last separator
    following = F.pad(phrase_ids[:, 1:], (0, 1), value=-1)
    return is_inside & (following == phrase_ids), index > end


class PromptPart(NamedTuple):
    """Consecutive phrases of each prompt of a batch, as prompts of their own; of a prompt that has no more, only its
    ends."""

    prompt: PromptTokens
    """(B, T), padded to the longest; phrases are counted from the part's first one."""
    first_phrase: Tensor
    """(B,) int64, the number of the part's first phrase in its prompt."""


def split_prompts(prompt: PromptTokens, *, max_tokens: int, max_phrases: int | None = None) -> list[PromptPart]:
    """Split prompts between phrases into as few parts as possible.

    Args:
        max_tokens: the largest number of tokens of a part, its first and last included.
        max_phrases: the largest number of its phrases; None: any.
    Raises:
        DataError: a single phrase has too many tokens.
    """
    tokens, phrase_ids, is_word = prompt
    count, capacity = phrase_ids.amax(1, keepdim=True) + 1, max_tokens - 2
    lengths = torch.zeros(len(phrase_ids), int(count.max()) + 1, dtype=torch.int64, device=phrase_ids.device)
    lengths.scatter_add_(1, phrase_ids + 1, torch.ones_like(phrase_ids))
    lengths = lengths[:, 1:]  # the first is of tokens outside of phrases
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
        kept = ((phrase_ids >= first) & (phrase_ids < last)) | ((phrase_ids < 0) & (tokens != PAD))
        order = (~kept).long().argsort(dim=1, stable=True)[:, : int(kept.sum(1).max())]
        fields = (tokens.where(kept, PAD), (phrase_ids - first).where(kept & (phrase_ids >= 0), -1), is_word & kept)
        parts.append(PromptPart(PromptTokens(*(field.gather(1, order) for field in fields)), first[:, 0]))
        first = last
    return parts
