"""A convolution over the tokens of a text, an alternative to recurrence and attention (Gehring et al. 2017,
https://arxiv.org/abs/1705.03122)."""

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError


class SequenceConvolution(nn.Module):
    """Mixes each token with its neighbours by a convolution, ReLU, dropout, a residual sum and a norm.

    Args:
        d_model: channels.
        kernel_size: number of tokens that one output depends on.
        causal: whether a token depends only on itself and those before it, as in a decoder.
        dropout: fraction of the values that are dropped.
    Raises:
        ConfigError: kernel_size is below 1, or even for a layer that is not causal.
    """

    def __init__(self, d_model: int, kernel_size: int = 3, *, causal: bool = False, dropout: float = 0.1):
        super().__init__()
        if kernel_size < 1 or (kernel_size % 2 == 0 and not causal):
            raise ConfigError(
                f"kernel_size: got {kernel_size}; expected an odd number, or any number from 1 up with causal=True."
            )
        self.before = kernel_size - 1 if causal else kernel_size // 2
        self.after = kernel_size - 1 - self.before
        self.conv = nn.Conv1d(d_model, d_model, kernel_size)
        self.norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Mix tokens: (B, S, d_model) -> (B, S, d_model).

        Args:
            x: (B, S, d_model).
            padding_mask: (B, S) bool, True = padding, which does not affect other tokens.
        """
        visible = x if padding_mask is None else x.masked_fill(padding_mask[..., None], 0)
        mixed = self.conv(F.pad(visible.transpose(1, 2), (self.before, self.after))).transpose(1, 2)
        return self.norm(x + self.dropout(mixed.relu()))
