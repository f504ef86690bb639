"""Transformer layers and stacks (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), with DETR's positions.

Positions are added to the queries and keys of every layer, never to values
(Carion et al. 2020, appendix A.3, https://arxiv.org/abs/2005.12872). Pass None if the input already contains them.

Dropout follows each attention and feed-forward network. All layers and stacks take
    num_heads: number of attention heads, a divisor of `d_model`.
    d_ffn: channels inside the feed-forward network.
    dropout: fraction dropped after each attention and feed-forward network, and inside both, in training.
    norm_first: False: normalize after each residual sum (post-norm, as originally published); True: the input of each
        branch, and the output of the stack once (pre-norm, Xiong et al. 2020, https://arxiv.org/abs/2002.04745).
    activation: "relu" (as originally published), "gelu", "gelu_tanh" (its approximation in GPT-2) or "silu", between
        the feed-forward network's layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.layers import Activation, FeedForward


def with_positions(x: Tensor, positions: Tensor | None) -> Tensor:
    """Return x + positions, or x if positions is None."""
    return x if positions is None else x + positions


def self_attention(
    attention: MultiHeadAttention, positions: Tensor | None, bias: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return the function that lets tokens, (B, L, d_model), attend to each other at their positions."""

    def attend(x: Tensor) -> Tensor:
        qk = with_positions(x, positions)
        return attention(qk, qk, x, bias=bias)

    return attend


class TransformerEncoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with dropout, a residual sum and a norm."""

    activation_checkpointing = False
    # Layers that write text token by token have another one, see `vitkit.seq2seq.incremental`.
    attention_class: type[MultiHeadAttention] = MultiHeadAttention

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
    ):
        super().__init__()
        self.norm_first = norm_first
        self.self_attn = self.attention_class(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout, activation=activation)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        """Encode tokens: (B, S, d_model) -> (B, S, d_model).

        Args:
            x: (B, S, d_model).
            positions: (B or 1, S, d_model).
            bias: float, broadcastable to (B, heads, S, S).
        """
        return self._with_residuals(x, self_attention(self.self_attn, positions, bias))

    def _with_residuals(self, x: Tensor, self_attention: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            x = x + self.dropout(self_attention(self.norm1(x)))
            return x + self.dropout(self.ffn(self.norm2(x)))
        x = self.norm1(x + self.dropout(self_attention(x)))
        return self.norm2(x + self.dropout(self.ffn(x)))


class TransformerDecoderLayer(nn.Module):
    """Self-attention, cross-attention and a feed-forward network, each with dropout, a residual sum and a norm."""

    activation_checkpointing = False
    # Layers that write text token by token have another one, see `vitkit.seq2seq.incremental`.
    attention_class: type[MultiHeadAttention] = MultiHeadAttention

    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Activation = "relu",
    ):
        super().__init__()
        self.norm_first = norm_first
        self.self_attn = self.attention_class(d_model, num_heads, dropout)
        self.cross_attn = self.attention_class(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout, activation=activation)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        memory_keys: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory_bias: Tensor | None = None,
    ) -> Tensor:
        """Decode tokens: (B, L, d_model) -> (B, L, d_model).

        Args:
            x: (B, L, d_model).
            memory: (B, S, d_model), the values of the cross-attention.
            memory_keys: (B, S, d_model), its keys: memory with its positions.
            positions: (B or 1, L, d_model), the positions of `x`.
            bias: bias of the self-attention, float, broadcastable to (B, heads, L, L).
            memory_bias: bias of the cross-attention, float, broadcastable to (B, heads, L, S).
        """

        def cross_attention(x: Tensor) -> Tensor:
            return self.cross_attn(with_positions(x, positions), memory_keys, memory, bias=memory_bias)

        return self._with_residuals(x, self_attention(self.self_attn, positions, bias), cross_attention)

    def _with_residuals(
        self, x: Tensor, self_attention: Callable[[Tensor], Tensor], cross_attention: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if self.norm_first:
            x = x + self.dropout(self_attention(self.norm1(x)))
            x = x + self.dropout(cross_attention(self.norm2(x)))
            return x + self.dropout(self.ffn(self.norm3(x)))
        x = self.norm1(x + self.dropout(self_attention(x)))
        x = self.norm2(x + self.dropout(cross_attention(x)))
        return self.norm3(x + self.dropout(self.ffn(x)))


class LayerStack(nn.Module):
    """Base of a stack of layers with a norm at its end.

    Args:
        final_norm: whether the output is normalized; None: only with `norm_first`.
        options: the other arguments of the layers.
    """

    layer_class: type[nn.Module]

    def __init__(
        self, num_layers: int, d_model: int, *, norm_first: bool = False, final_norm: bool | None = None, **options: Any
    ):
        super().__init__()
        options["norm_first"] = norm_first
        self.layers = nn.ModuleList(self.layer_class(d_model, **options) for _ in range(num_layers))
        final_norm = norm_first if final_norm is None else final_norm
        self.norm = nn.LayerNorm(d_model) if final_norm else nn.Identity()


class TransformerEncoder(LayerStack):
    """A stack of encoder layers, by default with a final norm only if `norm_first`, as published; PyTorch's own
    `nn.Transformer` always has one."""

    layer_class = TransformerEncoderLayer

    def forward(self, x: Tensor, positions: Tensor | None = None, *, bias: Tensor | None = None) -> Tensor:
        """Encode tokens: (B, S, d_model) -> (B, S, d_model); arguments as in a layer."""
        for layer in self.layers:
            x = layer(x, positions, bias=bias)
        return self.norm(x)


class TransformerDecoder(LayerStack):
    """A stack of decoder layers.

    Args:
        final_norm: whether the output is normalized, by one norm shared by the outputs of all layers; None: only with
            `norm_first`.
        all_layers: whether to return the outputs of all layers, for losses after each of them.
        options: the other arguments of `LayerStack`.
    """

    layer_class = TransformerDecoderLayer

    def __init__(
        self, num_layers: int, d_model: int, *, final_norm: bool | None = True, all_layers: bool = True, **options: Any
    ):
        super().__init__(num_layers, d_model, final_norm=final_norm, **options)
        self.all_layers = all_layers

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        bias: Tensor | None = None,
        memory_bias: Tensor | None = None,
    ) -> Tensor:
        """Decode tokens with every layer.

        Args:
            memory_positions: (B or 1, S, d_model). The other arguments are as in a layer.
        Returns:
            (layers, B, L, d_model), every layer's output, normalized; without `all_layers` (B, L, d_model), the last
            layer's.
        """
        memory_keys = with_positions(memory, memory_positions)
        outputs = []
        for layer in self.layers:
            x = layer(x, memory, memory_keys=memory_keys, positions=positions, bias=bias, memory_bias=memory_bias)
            outputs.append(x)
        return self.norm(torch.stack(outputs) if self.all_layers else x)
