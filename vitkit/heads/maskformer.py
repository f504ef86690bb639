"""MaskFormer (Cheng et al. 2021, https://arxiv.org/abs/2107.06278): queries that each predict a class and a mask."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.mask_features import check_pixel_decoder
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class MaskFormerHead(QueryHead):
    """MaskFormer's transformer, which reads the coarsest map, and its predictions.

    Args:
        feature_info: description of a pixel decoder's maps: "mask_features" first, then those that the queries attend
            to.
        num_classes: number of classes, without "no object".
        num_queries: number of masks predicted per image.
        d_model, num_heads, d_ffn, dropout, norm_first, activation: of all layers, see `vitkit.nn.transformer`.
    Raises:
        ConfigError: there is no mask-feature map, or no other map.
    """

    query_outputs = ("pred_logits", "mask_embed")
    shared_outputs = ("mask_features",)

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
        num_encoder_layers: int = 0,
        num_decoder_layers: int = 6,
        norm_first: bool = False,
        activation: Literal["relu", "gelu", "silu"] = "relu",
    ):
        super().__init__()
        check_pixel_decoder("MaskFormerHead", feature_info, num_levels=1)
        self.feature_name = list(feature_info)[-1]
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model
        channels = feature_info[self.feature_name].channels
        self.input_proj = nn.Identity() if channels == d_model else nn.Conv2d(channels, d_model, kernel_size=1)
        if channels != d_model:
            nn.init.kaiming_uniform_(self.input_proj.weight, a=1)
            nn.init.zeros_(self.input_proj.bias)
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **layer)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, **layer)
        init_xavier(self.encoder, self.decoder)
        self.query_embed = nn.Embedding(num_queries, d_model)
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
        image = self.input_proj(features[self.feature_name])  # (B, d_model, h', w')
        size = image.shape[-2:]
        padding = None if padding_mask is None else resize_mask(padding_mask, size)
        memory_bias = None if padding is None else padding_bias(padding.flatten(1), image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=padding, device=image.device)
        positions = positions.flatten(1, 2).to(image.dtype)

        memory = self.encoder(image.flatten(2).transpose(1, 2), positions, bias=memory_bias)
        queries = self.make_queries(self.query_embed.weight.expand(image.shape[0], -1, -1))
        if added is not None:
            queries = added.join(queries, self)
        states = self.decoder(
            queries.content,
            memory,
            positions=queries.positions,
            memory_positions=positions,
            bias=queries.bias,
            memory_bias=memory_bias,
        )  # (layers, B, Q, d_model)
        logits = self.class_embed(states).unbind()
        embeds = self.mask_embed(states).unbind()
        return {
            "pred_logits": logits[-1],  # (B, Q, num_classes + 1), the last class being "no object"
            "mask_embed": embeds[-1],  # (B, Q, channels), whose product with the mask features is the masks
            "mask_features": mask_features,
            "pred_masks": mask_logits(embeds[-1][:, -self.num_queries :], mask_features),  # (B, Q, h, w) logits
            # One for each decoder layer but the last, without pred_masks: losses need only those of matched queries.
            "aux_outputs": [
                {"pred_logits": l, "mask_embed": e, "mask_features": mask_features}
                for l, e in zip(logits[:-1], embeds[:-1])
            ],
        }

    def make_queries(self, learned: Tensor, boxes: None = None) -> Queries:
        """Return queries with learned positions, (B, Q, d_model), and without content; see `QueryHead`."""
        return Queries(content=torch.zeros_like(learned), positions=learned)
