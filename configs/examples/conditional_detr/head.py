"""Conditional DETR (Meng et al. 2021, https://arxiv.org/abs/2108.06152): queries that look where they expect a box."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit import HEADS
from vitkit.errors import ConfigError
from vitkit.nn.attention import attend, padding_bias
from vitkit.nn.detection import box_head, boxes_around, check_channels, class_head
from vitkit.nn.layers import MLP, FeedForward, Linear, init_xavier
from vitkit.nn.position import sine_positions_2d, sine_positions_boxes
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.transformer import TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.structures import FeatureInfo


@HEADS.register
class ConditionalDETRHead(QueryHead):
    """A transformer over the coarsest map whose cross-attention separates what to look for from where to look.

    Args:
        feature_info: description of the neck's maps; the coarsest must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, d_ffn, dropout: of all layers, see `vitkit.nn.transformer`.
    Raises:
        ConfigError: the map does not have `d_model` channels, there are no queries, or `num_heads` does not divide
            `d_model`.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    reference = "points"

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
    ):
        super().__init__()
        self.feature_name, info = list(feature_info.items())[-1]
        check_channels("ConditionalDETRHead", {self.feature_name: info}, d_model)
        if num_queries < 1:
            raise ConfigError(f"ConditionalDETRHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **layer)
        self.decoder = ConditionalDecoder(num_decoder_layers, d_model, **layer)
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.ref_point_head = MLP((d_model, d_model, 2))
        init_xavier(self.encoder, self.decoder, self.ref_point_head)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query; arguments as in `QueryHead`."""
        image = features[self.feature_name]
        padding = None if padding_mask is None else resize_mask(padding_mask, image.shape[-2:])  # (B, h, w)
        memory_bias = None if padding is None else padding_bias(padding.flatten(1), image.dtype)
        positions = sine_positions_2d(image.shape[-2:], self.d_model, padding_mask=padding, device=image.device)
        positions = positions.flatten(1, 2).to(image.dtype)  # (B or 1, h * w, d_model)

        memory = self.encoder(image.flatten(2).transpose(1, 2), positions, bias=memory_bias)  # (B, h * w, d_model)
        queries = self.make_queries(self.query_embed.weight.expand(image.shape[0], -1, -1))
        if added is not None:
            queries = added.join(queries, self)
        states = self.decoder(queries, memory, memory_positions=positions, memory_bias=memory_bias)
        # Each layer predicts a box around the same point.
        layers = [
            {
                "pred_logits": self.class_embed(x),
                "pred_boxes": boxes_around(queries.references, self.bbox_embed(x)),
                "reference_points": queries.references,
            }
            for x in states
        ]
        return {
            "pred_logits": layers[-1]["pred_logits"],  # (B, Q, num_classes), one sigmoid per class
            "pred_boxes": layers[-1]["pred_boxes"],  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "reference_points": layers[-1]["reference_points"],  # (B, Q, 2), what the boxes are relative to
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
        }

    def make_queries(self, learned: Tensor, boxes: None = None) -> Queries:
        """Return queries with learned positions, (B, Q, d_model), and the points they stand for; see `QueryHead`."""
        points = self.ref_point_head(learned).float().sigmoid()
        return Queries(torch.zeros_like(learned), learned, references=points)


class ConditionalDecoder(nn.Module):
    """Decoder layers, and the spatial queries of each (equation 4)."""

    def __init__(self, num_layers: int, d_model: int, *, num_heads: int, d_ffn: int, dropout: float):
        super().__init__()
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout)
        self.layers = nn.ModuleList(
            ConditionalDecoderLayer(d_model, is_first=not i, **layer) for i in range(num_layers)
        )
        self.query_scale = MLP((d_model, d_model, d_model))
        self.norm = nn.LayerNorm(d_model)

    def forward(
        self, queries: Queries, memory: Tensor, *, memory_positions: Tensor, memory_bias: Tensor | None
    ) -> list[Tensor]:
        """Return the normalized states after each layer, (B, L, d_model)."""
        x = queries.content
        # The row comes first, as in the positions of the memory.
        points = sine_positions_boxes(queries.references.flip(-1), x.shape[-1]).to(x.dtype)  # (B, L, d_model)
        states = []
        for i, layer in enumerate(self.layers):
            x = layer(
                x,
                memory,
                positions=queries.positions,
                # The first layer's states are all zero, so its points are not transformed.
                spatial_queries=self.query_scale(x) * points if i else points,
                memory_positions=memory_positions,
                bias=queries.bias,
                memory_bias=memory_bias,
            )
            states.append(self.norm(x))
        return states


class ConditionalDecoderLayer(nn.Module):
    """Self-attention, conditional cross-attention and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(self, d_model: int, *, num_heads: int, d_ffn: int, dropout: float, is_first: bool):
        super().__init__()
        self.self_attn = ContentPositionAttention(d_model, num_heads, dropout)
        self.cross_attn = ConditionalCrossAttention(d_model, num_heads, dropout, uses_positions=is_first)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        positions: Tensor,
        spatial_queries: Tensor,
        memory_positions: Tensor,
        bias: Tensor | None,
        memory_bias: Tensor | None,
    ) -> Tensor:
        """Decode queries: (B, L, d_model) -> (B, L, d_model); positions and spatial queries have the same shape."""
        x = self.norm1(x + self.dropout(self.self_attn(x, positions, bias)))
        attended = self.cross_attn(x, memory, positions, spatial_queries, memory_positions, memory_bias)
        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.ffn(x)))


class ContentPositionAttention(nn.Module):
    """Self-attention with separate projections of contents and positions, which are added."""

    def __init__(self, d_model: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.q_content_proj, self.q_pos_proj = Linear(d_model, d_model), Linear(d_model, d_model)
        self.k_content_proj, self.k_pos_proj = Linear(d_model, d_model), Linear(d_model, d_model)
        self.v_proj, self.out_proj = Linear(d_model, d_model), Linear(d_model, d_model)

    def forward(self, x: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model)."""
        q = self.q_content_proj(x) + self.q_pos_proj(positions)
        k = self.k_content_proj(x) + self.k_pos_proj(positions)
        q, k, v = (split_heads(part, self.num_heads) for part in (q, k, self.v_proj(x)))
        x = attend(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(x.transpose(1, 2).flatten(2))


class ConditionalCrossAttention(nn.Module):
    """Cross-attention whose content and spatial queries are concatenated in each head (section 3.3, figure 3).

    Scores are the sum of content query x content key and spatial query x spatial key.

    Args:
        uses_positions: whether positions are also added to the contents: in the first layer, whose contents are zero.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float, *, uses_positions: bool):
        super().__init__()
        if d_model % num_heads:
            raise ConfigError(f"ConditionalCrossAttention: num_heads={num_heads} must divide d_model={d_model}.")
        self.num_heads, self.dropout = num_heads, dropout
        self.q_content_proj, self.k_content_proj = Linear(d_model, d_model), Linear(d_model, d_model)
        self.q_pos_proj = Linear(d_model, d_model) if uses_positions else None
        self.q_spatial_proj, self.k_pos_proj = Linear(d_model, d_model), Linear(d_model, d_model)
        self.v_proj, self.out_proj = Linear(d_model, d_model), Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        positions: Tensor,
        spatial_queries: Tensor,
        memory_positions: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Attend from L queries to S locations: (B, L, d_model) -> (B, L, d_model)."""
        q, spatial_q = self.q_content_proj(x), self.q_spatial_proj(spatial_queries)
        k, spatial_k = self.k_content_proj(memory), self.k_pos_proj(memory_positions).expand_as(memory)
        if self.q_pos_proj is not None:
            q, k = q + self.q_pos_proj(positions), k + spatial_k
        q, spatial_q, k, spatial_k, v = (
            split_heads(part, self.num_heads) for part in (q, spatial_q, k, spatial_k, self.v_proj(memory))
        )
        q, k = torch.cat((q, spatial_q), dim=-1), torch.cat((k, spatial_k), dim=-1)  # (B, heads, L or S, 2 * d)
        x = attend(q, k, v, bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(x.transpose(1, 2).flatten(2))


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, L, d_model) -> (B, heads, L, d)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
