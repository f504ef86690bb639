"""Mask2Former (Cheng et al. 2022, https://arxiv.org/abs/2112.01527): queries that attend only inside their masks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import MultiHeadAttention, mask_bias
from vitkit.nn.layers import MLP, FeedForward, init_xavier
from vitkit.nn.mask_features import check_pixel_decoder
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.ops.images import resize_mask
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class Mask2FormerHead(QueryHead):
    """Mask2Former's decoder, which reads the coarsest maps in turn, and its predictions.

    Args:
        feature_info: description of a pixel decoder's maps: "mask_features" first, then those that the queries attend
            to, fine to coarse.
        num_classes: number of classes, without "no object".
        num_queries: number of masks predicted per image.
        d_model, num_heads, d_ffn, dropout: of all layers, see `vitkit.nn.transformer`.
        num_decoder_layers: number of layers; they attend to one level each, coarse to fine, in turn.
        num_levels: number of the coarsest maps that are attended to.
        masked_attention: whether queries attend only within the masks predicted before; False: everywhere (table 4a).
        learned_queries: whether the queries' initial content is learned and predicts masks first, rather than zero
            (table 4b).
    Raises:
        ConfigError: there is no mask-feature map, or there are fewer other maps than levels.
    """

    query_outputs = ("pred_logits", "mask_embed")
    shared_outputs = ("mask_features",)
    attends_in_masks = True

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.0,
        num_decoder_layers: int = 9,
        num_levels: int = 3,
        masked_attention: bool = True,
        learned_queries: bool = True,
    ):
        super().__init__()
        if num_levels < 1:
            raise ConfigError(f"Mask2FormerHead: num_levels={num_levels}, expected at least 1.")
        check_pixel_decoder("Mask2FormerHead", feature_info, num_levels=num_levels)
        self.d_model, self.num_heads, self.num_queries = d_model, num_heads, num_queries
        self.learned_channels = 2 * d_model
        self.masked_attention, self.learned_queries = masked_attention, learned_queries
        self.num_initial_outputs = int(learned_queries)
        names = list(feature_info)
        self.level_names = names[: -num_levels - 1 : -1]
        self.input_proj = nn.ModuleList(
            nn.Identity()
            if feature_info[name].channels == d_model
            else nn.Conv2d(feature_info[name].channels, d_model, 1)
            for name in self.level_names
        )
        self.level_embed = nn.Embedding(num_levels, d_model)
        self.query_feat = nn.Embedding(num_queries, d_model)
        self.query_embed = nn.Embedding(num_queries, d_model)
        if not learned_queries:
            nn.init.zeros_(self.query_feat.weight).requires_grad_(False)
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout)
        self.layers = nn.ModuleList(MaskedDecoderLayer(d_model, **layer) for _ in range(num_decoder_layers))
        init_xavier(self.layers)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = MLP((d_model, d_model, d_model, feature_info["mask_features"].channels))

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict class logits and a mask per query, from the pixel decoder's maps; see `QueryHead`."""
        mask_features = features["mask_features"]  # (B, channels, h, w)
        memories, keys, paddings, small_features = [], [], [], []
        for name, project, code in zip(self.level_names, self.input_proj, self.level_embed.weight):
            x = project(features[name])
            size = x.shape[-2:]
            padding = None if padding_mask is None else resize_mask(padding_mask, size)
            memory = x.flatten(2).transpose(1, 2) + code  # (B, S, d_model)
            positions = sine_positions_2d(size, x.shape[1], padding_mask=padding, device=x.device)
            memories.append(memory)
            keys.append(memory + positions.flatten(1, 2).to(x.dtype))
            paddings.append(padding)
            # Resizing and the product with the queries commute, so the features are resized once instead of every mask.
            small_features.append(
                F.interpolate(mask_features, size=size, mode="bilinear", align_corners=False).detach()
            )

        learned = torch.cat((self.query_feat.weight, self.query_embed.weight), dim=1)
        queries = self.make_queries(learned.expand(mask_features.shape[0], -1, -1))
        if added is not None:
            queries = added.join(queries, self)
        x = queries.content
        logits, embeds = self._predict(x)
        predictions = [(logits, embeds)]
        for i, layer in enumerate(self.layers):
            level = i % len(memories)
            outside = outside_masks(embeds, small_features[level])  # (B, Q, S)
            if not self.masked_attention or (i == 0 and not self.learned_queries):
                outside = torch.zeros_like(outside)
            if queries.masks is not None:
                inside = queries.masks(small_features[level].shape[-2:]).flatten(2)
                outside = torch.cat((~inside, outside[:, inside.shape[1] :]), dim=1)
            memory_bias = mask_bias(hide_padding(outside, paddings[level]), memories[level].dtype)[:, None]
            x = layer(
                x,
                memories[level],
                memory_keys=keys[level],
                positions=queries.positions,
                memory_bias=memory_bias,
                bias=queries.bias,
            )
            logits, embeds = self._predict(x)
            predictions.append((logits, embeds))
        earlier = predictions[0 if self.learned_queries else 1 : -1]
        return {
            "pred_logits": logits,  # (B, Q, num_classes + 1), the last class being "no object"
            "mask_embed": embeds,  # (B, Q, channels), whose product with the mask features is the masks
            "mask_features": mask_features,
            "pred_masks": mask_logits(embeds[:, -self.num_queries :], mask_features),  # (B, Q, h, w) logits
            # One for the initial queries and each layer but the last, without pred_masks: losses need only those of
            # matched queries.
            "aux_outputs": [{"pred_logits": l, "mask_embed": e, "mask_features": mask_features} for l, e in earlier],
        }

    def make_queries(self, learned: Tensor, boxes: None = None) -> Queries:
        """Return queries with learned content and positions, from (B, Q, 2 * d_model); see `QueryHead`."""
        content, positions = learned.chunk(2, dim=-1)
        return Queries(content, positions)

    def _predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.decoder_norm(x)
        return self.class_embed(x), self.mask_embed(x)


class MaskedDecoderLayer(nn.Module):
    """Decoder layer with cross-attention before self-attention, post-norm (Cheng et al. 2022, section 3.2)."""

    activation_checkpointing = False

    def __init__(self, d_model: int, *, num_heads: int, d_ffn: int, dropout: float):
        super().__init__()
        self.cross_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
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
        positions: Tensor,
        memory_bias: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Let the queries attend to the memory, then to each other.

        Args:
            x: (B, Q, d_model).
            memory: (B, S, d_model), the values of the cross-attention.
            memory_keys: (B, S, d_model), memory with its positions.
            positions: (B or 1, Q, d_model), the positions of `x`.
            memory_bias: float, (B, 1, Q, S), which masks the locations that a query may not attend to.
            bias: bias of the self-attention, float, broadcastable to (B, heads, Q, Q).
        """
        attended = self.cross_attn(x + positions, memory_keys, memory, bias=memory_bias)
        x = self.norm1(x + self.dropout(attended))
        qk = x + positions
        x = self.norm2(x + self.dropout(self.self_attn(qk, qk, x, bias=bias)))
        return self.norm3(x + self.dropout(self.ffn(x)))


def outside_masks(mask_embed: Tensor, small_features: Tensor) -> Tensor:
    """Return which locations are outside each query's mask, (B, Q, S) bool."""
    return mask_logits(mask_embed.detach(), small_features).flatten(2) < 0


def hide_padding(outside: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return which locations each query may not attend to, (B, Q, S) bool: padding, and those outside its mask.

    (`mask_bias` lets a query whose locations are all masked attend everywhere; here padding then stays masked.)
    """
    if padding_mask is None:
        return outside
    padding = padding_mask.flatten(1)[:, None]  # (B, 1, S)
    outside = outside | padding
    return torch.where(outside.all(-1, keepdim=True), padding, outside)
