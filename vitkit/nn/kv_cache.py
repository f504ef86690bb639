"""A cache of the keys and values of a decoder's previous tokens, so that each step only computes the new ones."""

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one layer for N rows, in a buffer that is written in place and doubled when full.

    Args:
        capacity: initial number of tokens that fit.
    """

    def __init__(self, *, capacity: int = 32):
        self.length = 0
        self._capacity = capacity
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
        while self._capacity < length:
            self._capacity *= 2
        grown = like.new_empty(len(like), self._capacity, like.shape[-1])
        if self._buffer is not None:
            grown[:, : self.length] = self._buffer[:, : self.length]
        self._buffer, self._spare = grown, None
