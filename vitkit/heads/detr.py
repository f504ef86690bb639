"""DETR's head: a transformer over the image's places, and a set of queries that become boxes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import MLP
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class DETRHead(nn.Module):
    """Carion et al. 2020, https://arxiv.org/abs/2005.12872. Reads the coarsest map.

    Args:
        feature_info: of the neck's maps; the coarsest must have `d_model` channels.
        num_classes: without the no-object class.
        num_queries: boxes predicted per image.
        norm_first: pre-norm transformer layers.
    Raises:
        ConfigError: the map has other than `d_model` channels.
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
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        norm_first: bool = False,
    ):
        super().__init__()
        self.feature_name, info = list(feature_info.items())[-1]
        if info.channels != d_model:
            raise ConfigError(
                f"DETRHead: d_model={d_model}, but feature {self.feature_name!r} has {info.channels} channels: "
                "set both to the same number (model.neck.out_channels, model.head.d_model)."
            )
        if num_queries < 1:
            raise ConfigError(f"DETRHead: num_queries={num_queries}, expected at least 1.")
        self.d_model = d_model
        self.num_heads = num_heads
        sizes = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **sizes)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, **sizes)
        for matrix in [*self.encoder.parameters(), *self.decoder.parameters()]:
            if matrix.dim() > 1:
                nn.init.xavier_uniform_(matrix)
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.bbox_embed = MLP((d_model, d_model, d_model, 4))

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """
        Args:
            features: the neck's maps; the coarsest is (B, d_model, h, w).
            padding_mask: (B, H, W) bool of the images, True = padding.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            aux_outputs: the same two of each decoder layer but the last, first layer first.
        """
        return self.predict(self.decode(features, padding_mask).states)

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> "Decoded":
        """What the queries have become, before classes and boxes are read off; arguments as of `forward`."""
        image = features[self.feature_name]
        size = image.shape[-2:]
        bias = None
        if padding_mask is not None:
            padding_mask = resize_mask(padding_mask, size)
            bias = padding_bias(padding_mask.flatten(1), image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=padding_mask, device=image.device)
        positions = positions.flatten(1, 2).to(image.dtype)

        memory = self.encoder(image.flatten(2).transpose(1, 2), positions, bias=bias)
        queries = self.query_embed.weight.expand(len(image), -1, -1)
        states = self.decoder(
            torch.zeros_like(queries), memory, positions=queries, memory_positions=positions, memory_bias=bias
        )
        return Decoded(states, memory.transpose(1, 2).unflatten(2, size), padding_mask)

    def predict(self, states: Tensor) -> dict[str, Any]:
        """Classes and boxes of all layers, as `forward` returns them, from (layers, B, Q, d_model)."""
        logits, boxes = self.class_embed(states), self.bbox_embed(states).sigmoid()
        outputs = [dict(pred_logits=l, pred_boxes=b) for l, b in zip(logits.unbind(), boxes.unbind())]
        return dict(**outputs[-1], aux_outputs=outputs[:-1])


class Decoded(NamedTuple):
    """What the transformer gives."""

    states: Tensor
    """(layers, B, Q, d_model)."""
    memory: Tensor
    """(B, d_model, h, w), the encoded map."""
    padding_mask: Tensor | None
    """(B, h, w) bool, True = padding."""
