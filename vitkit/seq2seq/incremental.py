"""Transformer layers that write text token by token, with a cache of the keys and values of earlier tokens.

In training they are those of `vitkit.nn.transformer`. Each step then only computes the new tokens, which attend to the
cached keys and values of the earlier ones, and to a memory that is projected once.
"""

import torch
from torch import Tensor

from vitkit.kernels.attention import attend_explicit
from vitkit.kernels.linear import linear
from vitkit.nn.attention import MultiHeadAttention, attend
from vitkit.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

_FIRST_CAPACITY = 32
"""Number of tokens that a new cache has room for."""


class KeyValueCache:
    """The keys and values of one layer for N rows, in a buffer that is written in place and doubled when full."""

    def __init__(self):
        self.length = 0
        self._buffer: Tensor | None = None  # (N, capacity, C)
        self._spare: Tensor | None = None  # buffer that `select` writes to, with at least N rows

    def append(self, keys_values: Tensor) -> Tensor:
        """Append L tokens.

        Args:
            keys_values: (N, L, C).
        Returns:
            (N, length, C), the keys and values of all tokens, as a view that is valid until the next call.
        """
        end = self.length + keys_values.shape[1]
        if self._buffer is None or end > self._buffer.shape[1]:
            self._grow(keys_values, end)
        self._buffer[:, self.length : end] = keys_values
        self.length = end
        return self._buffer[:, :end]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, which may be repeated, reordered, or fewer.

        Args:
            rows: (M,) int64, in 0..N-1.
        """
        if self._buffer is None:
            return
        if self._spare is None or len(self._spare) < len(rows):
            self._spare = self._buffer.new_empty(len(rows), *self._buffer.shape[1:])
        selected = self._spare[: len(rows)]
        torch.index_select(self._buffer[:, : self.length], 0, rows, out=selected[:, : self.length])
        self._buffer, self._spare = selected, self._buffer

    def _grow(self, like: Tensor, length: int) -> None:
        capacity = _FIRST_CAPACITY if self._buffer is None else self._buffer.shape[1]
        while capacity < length:
            capacity *= 2
        grown = like.new_empty(len(like), capacity, like.shape[-1])
        if self._buffer is not None:
            grown[:, : self.length] = self._buffer[:, : self.length]
        self._buffer, self._spare = grown, None


class CachedAttention(MultiHeadAttention):
    """Multi-head attention of new tokens to those before them, or to a memory that is already projected."""

    def attend_on(self, x: Tensor, cache: KeyValueCache, *, bias: Tensor | None = None) -> Tensor:
        """Let new tokens of a sequence attend to the cached ones and to themselves, and append them to the cache.

        Args:
            x: (B, L, d_model), the tokens that follow the cached ones.
            bias: float, broadcastable to (B, heads, L, cached + L).
        Returns:
            (B, L, d_model).
        """
        projected = linear(x, self.in_proj_weight, self.in_proj_bias)
        q, keys_values = projected.split([x.shape[-1], 2 * x.shape[-1]], dim=-1)
        k, v = self._heads(cache.append(keys_values))
        return self._attend(q, k, v, bias)[0]

    def project_memory(self, memory: Tensor) -> Tensor:
        """Project a memory (B, S, d_model) to keys and values for `attend_to`, (2, B, heads, S, d)."""
        d_model = memory.shape[-1]
        keys_values = linear(memory, self.in_proj_weight[d_model:], self.in_proj_bias[d_model:])
        return self._heads(keys_values).contiguous()

    def attend_to(
        self, queries: Tensor, memory: Tensor, *, bias: Tensor | None = None, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to keys and values that are already projected.

        Args:
            queries: (B, L, d_model).
            memory: (2, B, heads, S, d), from `project_memory`.
            bias: float, broadcastable to (B, heads, L, S).
            with_weights: whether to return the weights.
        Returns:
            (B, L, d_model), and the weights (B, heads, L, S) or None.
        """
        d_model = queries.shape[-1]
        q = linear(queries, self.in_proj_weight[:d_model], self.in_proj_bias[:d_model])
        return self._attend(q, *memory, bias, with_weights=with_weights)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, with_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from projected queries (B, L, d_model) to keys and values (B, heads, S, d), without dropout."""
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        output, weights = attend_explicit(q, k, v, bias) if with_weights else (attend(q, k, v, bias), None)
        return self.out_proj(output.transpose(1, 2).flatten(2)), weights

    def _heads(self, keys_values: Tensor) -> Tensor:
        """(B, S, 2 * d_model) -> (2, B, heads, S, d)."""
        return keys_values.unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)


class IncrementalEncoderLayer(TransformerEncoderLayer):
    """An encoder layer that can also process the tokens of a text a few at a time."""

    attention_class = CachedAttention

    def step(self, x: Tensor, cache: KeyValueCache, *, bias: Tensor | None = None) -> Tensor:
        """Encode the tokens (B, L, d_model) that follow those in the cache, and append them to it.

        See `CachedAttention.attend_on`.
        """
        return self._with_residuals(x, lambda x: self.self_attn.attend_on(x, cache, bias=bias))


class IncrementalDecoderLayer(TransformerDecoderLayer):
    """A decoder layer that can also process the tokens of a text one at a time."""

    attention_class = CachedAttention

    def step(
        self,
        x: Tensor,
        cache: KeyValueCache,
        *,
        memory: Tensor,
        memory_bias: Tensor | None = None,
        with_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the single token that follows those in the cache, and append it to the cache.

        Args:
            x: (N, 1, d_model); N is a multiple of B, and rows that share a memory are consecutive.
            memory: (2, B, heads, S, d), from `CachedAttention.project_memory`.
            memory_bias: float, broadcastable to (B, heads, 1, S).
            with_weights: whether to return the weights.
        Returns:
            (N, 1, d_model), and the weights of the cross-attention (N, heads, S) or None.
        """
        weights = None

        def cross_attention(x: Tensor) -> Tensor:
            nonlocal weights
            # Rows that share a memory are passed as queries of one sequence, so that the memory is read once for all.
            grouped = x.view(memory.shape[1], -1, x.shape[-1])
            output, weights = self.cross_attn.attend_to(grouped, memory, bias=memory_bias, with_weights=with_weights)
            return output.view_as(x)

        x = self._with_residuals(x, lambda x: self.self_attn.attend_on(x, cache), cross_attention)
        return x, None if weights is None else weights.transpose(1, 2).flatten(0, 1)


class IncrementalEncoder(TransformerEncoder):
    """A stack of layers for models in which the text follows its prompt."""

    layer_class = IncrementalEncoderLayer


class IncrementalDecoder(TransformerDecoder):
    """A stack of layers for models in which the text attends to a memory."""

    layer_class = IncrementalDecoderLayer
