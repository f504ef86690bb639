"""Mask2Former's head: queries that attend only inside their masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.maskformer import check_pixel_decoder, with_masks
from vitkit.nn.attention import MultiHeadAttention, mask_bias
from vitkit.nn.layers import MLP, FeedForward, checkpoint_block, init_xavier
from vitkit.nn.mask_denoising import MaskDenoising, MaskDenoisingSettings
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.query_groups import GroupQueries, GroupSettings
from vitkit.nn.training_queries import KnownQueries
from vitkit.nn.transformer import LayerSettings
from vitkit.ops.images import resize_mask
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import DetectionTarget, FeatureInfo


class MaskedDecoderLayer(nn.Module):
    """Decoder layer with cross-attention before self-attention, post-norm (Cheng et al. 2022, section 3.2)."""

    activation_checkpointing = False

    def __init__(self, d_model: int, settings: LayerSettings):
        super().__init__()
        dropout = settings.dropout
        self.cross_attn = MultiHeadAttention(d_model, settings.num_heads, dropout)
        self.self_attn = MultiHeadAttention(d_model, settings.num_heads, dropout)
        self.ffn = FeedForward(d_model, settings.d_ffn, dropout=dropout)
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


@dataclass(frozen=True)
class Mask2FormerSettings(LayerSettings):
    """Settings of a decoder with masked attention."""

    dropout: float = 0.0
    d_model: int = 256
    num_decoder_layers: int = 9
    """Number of layers; they attend to one level each, coarse to fine, in turn."""
    num_levels: int = 3
    """Number of the coarsest maps that are attended to."""
    masked_attention: bool = True
    """Whether queries attend only within the masks predicted before; False: everywhere (the paper's table 4a)."""
    learned_queries: bool = True
    """Whether the queries' initial content is learned and predicts masks first, rather than zero (table 4b)."""


@HEADS.register
class Mask2FormerHead(nn.Module):
    """Mask2Former's head (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

    Args:
        feature_info: description of a pixel decoder's maps: "mask_features" first, then, fine to coarse, the maps to
            attend to.
        num_classes: number of classes, without "no object".
        num_queries: number of masks predicted per image.
        denoising: see `MaskDenoisingSettings` (MP-Former).
        query_groups: further queries in training (Group DETR, H-DETR).
    Raises:
        ConfigError: there is no mask-feature map, too few others, or none to attend to; or the training queries are
            invalid.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: Mask2FormerSettings = Mask2FormerSettings(),
        denoising: MaskDenoisingSettings = MaskDenoisingSettings(),
        query_groups: GroupSettings = GroupSettings(),
    ):
        super().__init__()
        d_model, num_levels = settings.d_model, settings.num_levels
        if num_levels < 1:
            raise ConfigError(f"model.head.num_levels: got {num_levels}; expected at least 1.")
        check_pixel_decoder("Mask2FormerHead", feature_info, num_levels=num_levels)
        names = list(feature_info)
        self.level_names = names[: -num_levels - 1 : -1]
        self.num_heads = settings.num_heads
        self.input_proj = nn.ModuleList(
            nn.Identity()
            if feature_info[name].channels == d_model
            else nn.Conv2d(feature_info[name].channels, d_model, 1)
            for name in self.level_names
        )
        self.level_embed = nn.Embedding(num_levels, d_model)
        self.query_feat = nn.Embedding(num_queries, d_model)
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.settings = settings
        if not settings.learned_queries:
            nn.init.zeros_(self.query_feat.weight).requires_grad_(False)
        self.layers = nn.ModuleList(MaskedDecoderLayer(d_model, settings) for _ in range(settings.num_decoder_layers))
        init_xavier(self.layers)
        self.decoder_norm = nn.LayerNorm(d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = MLP((d_model, d_model, d_model, feature_info["mask_features"].channels))
        self.group_queries = GroupQueries(query_groups, num_queries, 2 * d_model)
        self.denoising = None
        if denoising.denoising_queries is not None:
            self.denoising = MaskDenoising(num_classes, d_model, denoising)

    @property
    def uses_targets(self) -> bool:
        """Whether training adds denoising queries, which are made from the targets."""
        return self.denoising is not None

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        targets: Sequence[DetectionTarget] | None = None,
    ) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        Args:
            targets: only in training, if there is denoising: the targets, with masks of the padded images, that known
                queries are made from.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_masks: (B, Q, h, w) logits at the stride of the mask features.
            mask_embed, mask_features: (B, Q, channels) and (B, channels, h, w), whose product is pred_masks.
            aux_outputs: the same, without pred_masks, for the initial queries and each decoder layer but the last.
            denoising: with targets, the same for the known queries, but only for decoder layers; see `QueryLayout`.
            groups, one_to_many: in training, the same for further groups of queries, see `QueryLayout`.
        """
        mask_features = features["mask_features"]
        memories, keys, paddings, small_features = [], [], [], []
        for name, project, code in zip(self.level_names, self.input_proj, self.level_embed.weight):
            x = project(features[name])
            size = x.shape[-2:]
            padding = None if padding_mask is None else resize_mask(padding_mask, size)
            memory = x.flatten(2).transpose(1, 2) + code
            positions = sine_positions_2d(size, x.shape[1], padding_mask=padding, device=x.device)
            memories.append(memory)
            keys.append(memory + positions.flatten(1, 2).to(x.dtype))
            paddings.append(padding)
            # Resizing and the product with the queries commute, so the features are resized once instead of every mask.
            small_features.append(
                F.interpolate(mask_features, size=size, mode="bilinear", align_corners=False).detach()
            )

        known = None
        if self.denoising is not None and targets is not None:
            known = self.denoising(targets, [maps.shape[-2:] for maps in small_features])
        layout = self.group_queries.layout(known)
        x, positions = self._queries(mask_features.shape[0], known)
        self_bias = layout.attention_bias(x)
        layers = [self._predict(x)]
        for i, layer in enumerate(self.layers):
            level = i % len(memories)
            outside = outside_masks(layers[-1]["mask_embed"], small_features[level])
            if not self.settings.masked_attention or (i == 0 and not self.settings.learned_queries):
                outside = torch.zeros_like(outside)
            if known is not None:
                outside = torch.cat((known.outside(level).flatten(2), outside[:, known.content.shape[1] :]), dim=1)
            bias = mask_bias(hide_padding(outside, paddings[level]), memories[level].dtype)[:, None]
            x = checkpoint_block(
                layer,
                x,
                memories[level],
                memory_keys=keys[level],
                positions=positions,
                memory_bias=bias,
                bias=self_bias,
            )
            layers.append(self._predict(x))
        outputs = layout.outputs(layers)
        if known is not None:
            # Before the first layer, a known query has only its class, which says nothing about its mask.
            outputs["denoising"]["aux_outputs"] = outputs["denoising"]["aux_outputs"][1:]
        if not self.settings.learned_queries:
            outputs["aux_outputs"] = outputs["aux_outputs"][1:]
        return with_masks(outputs, mask_features)

    def _queries(self, batch_size: int, known: KnownQueries | None) -> tuple[Tensor, Tensor]:
        """Return content and positions of all queries, (B, L, d_model) each; known queries have no position."""
        learned = torch.cat((self.query_feat.weight, self.query_embed.weight), dim=1)
        content, positions = self.group_queries.before(learned).expand(batch_size, -1, -1).chunk(2, dim=-1)
        if known is None:
            return content, positions
        nowhere = torch.zeros_like(known.content)
        return torch.cat((known.content, content), dim=1), torch.cat((nowhere, positions), dim=1)

    def _predict(self, x: Tensor) -> dict[str, Tensor]:
        x = self.decoder_norm(x)
        return dict(pred_logits=self.class_embed(x), mask_embed=self.mask_embed(x))


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
