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


def blocks_of(tokens: Tensor, separators: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return `blocks` and `is_word` of tokens that were not made phrase by phrase, such as a sentence's.

    Args:
        tokens: (B, S) int64.
        separators: (K,) int64, the tokens that end a phrase.
        outside: (M,) int64, those that belong to no phrase: the first, the last, and padding.
    """
    ends, is_outside = torch.isin(tokens, separators), torch.isin(tokens, outside)
    blocks = ends.cumsum(1) - ends.long()  # the separators before each token
    return blocks.masked_fill(is_outside, -1), ~(ends | is_outside)
