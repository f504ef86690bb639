"""MaskFormer's head: DETR's decoder, whose queries give a class and a mask."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.heads.mask_predictions import MaskPredictions, check_pixel_decoder
from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import MLP
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class MaskFormerHead(nn.Module):
    """Cheng et al. 2021, https://arxiv.org/abs/2107.06278. Reads the map for masks and the coarsest map.

    Args:
        feature_info: of a pixel decoder's maps: "mask_features" first, then what the queries attend to.
        num_classes: without the no-object class.
        num_queries: masks predicted per image.
    Raises:
        ConfigError: there is no map for masks, or no other.
    """

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
    ):
        super().__init__()
        check_pixel_decoder("MaskFormerHead", feature_info, num_levels=1)
        self.feature_name = list(feature_info)[-1]
        channels = feature_info[self.feature_name].channels
        self.d_model = d_model
        self.input_proj = nn.Identity() if channels == d_model else nn.Conv2d(channels, d_model, kernel_size=1)
        if channels != d_model:
            nn.init.kaiming_uniform_(self.input_proj.weight, a=1)
            nn.init.zeros_(self.input_proj.bias)
        sizes = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **sizes)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, **sizes)
        for matrix in [*self.encoder.parameters(), *self.decoder.parameters()]:
            if matrix.dim() > 1:
                nn.init.xavier_uniform_(matrix)
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = MLP((d_model, d_model, d_model, feature_info["mask_features"].channels))

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            features: of a pixel decoder.
            padding_mask: (B, H, W) bool of the images, True = padding, which is then not attended to.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_masks: (B, Q, h, w) logits at the stride of the map for masks.
            aux_outputs: the same two of each decoder layer but the last, first layer first.
        """
        states = self.decode(features, padding_mask)
        outputs = [
            MaskPredictions(logits, embed, features["mask_features"])
            for logits, embed in zip(self.class_embed(states), self.mask_embed(states))
        ]
        return dict(outputs[-1], pred_masks=outputs[-1]["pred_masks"], aux_outputs=outputs[:-1])

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Tensor:
        """(L, B, Q, d_model): the queries after each decoder layer; arguments as of `forward`."""
        image = self.input_proj(features[self.feature_name])
        size = image.shape[-2:]
        mask = None if padding_mask is None else resize_mask(padding_mask, size)
        bias = None if mask is None else padding_bias(mask.flatten(1), image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=mask, device=image.device)
        positions = positions.flatten(1, 2).to(image.dtype)

        memory = self.encoder(image.flatten(2).transpose(1, 2), positions, bias=bias)
        queries = self.query_embed.weight.expand(len(image), -1, -1)
        return self.decoder(
            torch.zeros_like(queries), memory, positions=queries, memory_positions=positions, memory_bias=bias
        )
