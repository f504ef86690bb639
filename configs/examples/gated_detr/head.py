"""DETR's head with another cross-attention, whose output each query gates, as in gated attention (Qiu et al. 2025,
https://arxiv.org/abs/2505.06708)."""

from torch import nn

from vitkit import HEADS
from vitkit.heads.detr import DETRHead
from vitkit.nn.attention import MultiHeadAttention


class GatedAttention(MultiHeadAttention):
    """Multi-head attention whose output channels are scaled by 0 to 2, which starts at 1."""

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0):
        super().__init__(d_model, num_heads, dropout)
        self.gate = nn.Linear(d_model, d_model)
        for parameter in self.gate.parameters():
            nn.init.zeros_(parameter)

    def forward(self, queries, keys, values, *, bias=None):
        return super().forward(queries, keys, values, bias=bias) * 2 * self.gate(queries).sigmoid()


@HEADS.register
class GatedDETRHead(DETRHead):
    """`DETRHead` with gated cross-attention; arguments as there."""

    def __init__(self, feature_info, num_classes, **arguments):
        super().__init__(feature_info, num_classes, **arguments)
        for layer in self.decoder.layers:
            attention = layer.cross_attn
            layer.cross_attn = GatedAttention(self.d_model, attention.num_heads, attention.dropout)
