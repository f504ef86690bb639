"""Alignment scores: how well a query fits each key, in the forms compared in the literature.

A score is a module of two steps: `score.keys(x)` prepares the keys, once per sentence or image, and
`score(queries, keys)` compares queries with them at every step of a decoder. The softmax of the scores is
`attention.attention_weights`; `AlignmentAttention` combines both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import attention_weights, mask_bias, record_weights
from vitkit.registry import nearest


class AlignmentScore(nn.Module):
    """Base of all scores: a dot product of queries and prepared keys."""

    def keys(self, keys: Tensor) -> Tensor:
        """Prepare keys for `forward`: (B, S, d_key) -> (B, S, ...)."""
        return keys

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score each query against each key.

        Args:
            queries: (B, L, d_query), or (B, d_query) for one query each.
            keys: the result of `self.keys`.
        Returns:
            (B, L, S), or (B, S).
        """
        if queries.ndim == 2:
            return self.compare(queries[:, None], keys)[:, 0]
        return self.compare(queries, keys)

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Score queries (B, L, d_query) against prepared keys: (B, L, S)."""
        return queries @ keys.mT


class DotScore(AlignmentScore):
    """The score q . k (Luong et al. 2015, https://arxiv.org/abs/1508.04025).

    Raises:
        ConfigError: queries and keys have different sizes.
    """

    def __init__(self, d_query: int, d_key: int):
        super().__init__()
        if d_query != d_key:
            raise ConfigError(
                f"{type(self).__name__}: queries have {d_query} channels and keys {d_key}; expected the same number. "
                "Change a size, or use the score 'additive' or 'general'."
            )


class ScaledDotScore(DotScore):
    """The score q . k / sqrt(d) (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries * queries.shape[-1] ** -0.5) @ keys.mT


class PlainCosineScore(DotScore):
    """The score cos(q, k) = q . k / (|q| |k|) (Graves et al. 2014, equation 6, https://arxiv.org/abs/1410.5401).

    As scores are between -1 and 1, no weight is more than e^2 times another: attention cannot select one key of many.
    """

    def keys(self, keys: Tensor) -> Tensor:
        """Return the normalized keys, for `compare`."""
        return F.normalize(keys, dim=-1)

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        return F.normalize(queries, dim=-1) @ keys.mT


class CosineScore(PlainCosineScore):
    """The score strength * cos(q, k), with a learned strength (Graves et al. 2014, equation 5,
    https://arxiv.org/abs/1410.5401).
    """

    def __init__(self, d_query: int, d_key: int):
        super().__init__(d_query, d_key)
        self.strength = nn.Parameter(torch.tensor(10.0))

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.strength * super().compare(queries, keys)


class GeneralScore(AlignmentScore):
    """The bilinear score q W k (Luong et al. 2015, https://arxiv.org/abs/1508.04025)."""

    def __init__(self, d_query: int, d_key: int):
        super().__init__()
        self.key_proj = nn.Linear(d_key, d_query, bias=False)

    def keys(self, keys: Tensor) -> Tensor:
        """Return the projected keys, for `compare`."""
        return self.key_proj(keys)


class AdditiveScore(AlignmentScore):
    """The score v . tanh(W q + U k) (Bahdanau et al. 2015, appendix A.1.2, https://arxiv.org/abs/1409.0473).

    Args:
        d_attention: channels of the sum; None: those of the queries.
    """

    def __init__(self, d_query: int, d_key: int, d_attention: int | None = None):
        super().__init__()
        d_attention = d_attention or d_query
        self.query_proj = nn.Linear(d_query, d_attention, bias=False)
        self.key_proj = nn.Linear(d_key, d_attention)
        self.score_proj = nn.Linear(d_attention, 1, bias=False)

    def keys(self, keys: Tensor) -> Tensor:
        """Return the projected keys, for `compare`."""
        return self.key_proj(keys)

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        sums = self.query_proj(queries)[:, :, None] + keys[:, None]
        return self.score_proj(sums.tanh())[..., 0]


class ConcatScore(AlignmentScore):
    """The score v . tanh(W [q; k]) (Luong et al. 2015, section 3.1, https://arxiv.org/abs/1508.04025).

    This is `AdditiveScore` without its bias, and with its two matrices side by side in one.
    """

    def __init__(self, d_query: int, d_key: int):
        super().__init__()
        self.d_query = d_query
        self.proj = nn.Linear(d_query + d_key, d_query, bias=False)
        self.score_proj = nn.Linear(d_query, 1, bias=False)

    def keys(self, keys: Tensor) -> Tensor:
        """Return the keys times their columns of W, for `compare`."""
        return F.linear(keys, self.proj.weight[:, self.d_query :])

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        sums = F.linear(queries, self.proj.weight[:, : self.d_query])[:, :, None] + keys[:, None]
        return self.score_proj(sums.tanh())[..., 0]


class LocationScore(AlignmentScore):
    """The score (W q)_j of the key at position j, whatever that key is: a = softmax(W q) (Luong et al. 2015,
    section 3.1, https://arxiv.org/abs/1508.04025).

    W has a row for each of the first `max_keys` positions. As in the paper, fewer keys use only the first rows, and
    keys at later positions get no weight.

    Raises:
        ConfigError: `max_keys` is less than 1.
    """

    def __init__(self, d_query: int, d_key: int, max_keys: int):
        super().__init__()
        if max_keys < 1:
            raise ConfigError(f"LocationScore: max_keys={max_keys}; expected at least 1.")
        self.position_proj = nn.Linear(d_query, max_keys, bias=False)

    def compare(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the score of each pair of a query and a key's position."""
        num_keys = keys.shape[1]
        scores = self.position_proj(queries)[..., :num_keys]
        # Above the bias of a padded key, and finite if that is added: see `mask_bias`.
        return F.pad(scores, (0, num_keys - scores.shape[-1]), value=torch.finfo(scores.dtype).min / 4)


SCORES = {
    "additive": AdditiveScore,
    "concat": ConcatScore,
    "dot": DotScore,
    "scaled_dot": ScaledDotScore,
    "general": GeneralScore,
    "cosine": CosineScore,
    "plain_cosine": PlainCosineScore,
    "location": LocationScore,
}


def needs_equal_sizes(score: str | None) -> bool:
    """Return whether a score of `SCORES` compares queries and keys channel by channel; unknown scores do not."""
    return issubclass(SCORES.get(score, AlignmentScore), DotScore)


class AlignmentAttention(nn.Module):
    """Single-head attention with any alignment score.

    Args:
        score: a key of `SCORES`.
        d_query: channels of the queries.
        d_key: channels of the keys.
        max_keys: the number of keys that "location" can give weight to; the other scores have no limit.
    Raises:
        ConfigError: the score is unknown, or cannot compare these sizes.
    """

    def __init__(self, score: str, d_query: int, *, d_key: int, max_keys: int = 100):
        super().__init__()
        if score not in SCORES:
            raise ConfigError(f"attention: unknown score {score!r}. {nearest(score, SCORES)}")
        limits = {"max_keys": max_keys} if score == "location" else {}
        self.score = SCORES[score](d_query, d_key, **limits)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries to keys that are already prepared.

        Args:
            queries: (B, L, d_query).
            keys: the result of `self.score.keys`.
            values: (B, S, d_value).
            padding_mask: (B, S) bool, True = padding, which gets zero weight.
        Returns:
            the weighted values (B, L, d_value), and the weights (B, L, S) float32.
        """
        bias = None if padding_mask is None else mask_bias(padding_mask[:, None])
        weights = attention_weights(self.score(queries, keys), bias)
        record_weights(weights[:, None])
        return weights.to(values.dtype) @ values, weights
