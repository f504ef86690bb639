"""DETR's head: a transformer over one map's locations, and a set of queries that become boxes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import EncoderDecoderSettings, TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


class Decoded(NamedTuple):
    """What the transformer returns."""

    states: Tensor
    """(layers, B, Q, d_model)."""
    memory: Tensor
    """(B, d_model, h, w), the encoded map."""
    padding_mask: Tensor | None
    """(B, h, w) bool, True = padding."""


class TransformerHead(nn.Module):
    """Base of heads with DETR's transformer; a subclass calls `make_transformer` in its constructor."""

    def make_transformer(self, num_queries: int, settings: EncoderDecoderSettings) -> None:
        """Make queries, an encoder and a decoder."""
        self.d_model = settings.d_model
        self.encoder = TransformerEncoder(settings.num_encoder_layers, self.d_model, settings)
        self.decoder = TransformerDecoder(settings.num_decoder_layers, self.d_model, settings)
        init_xavier(self.encoder, self.decoder)
        self.query_embed = nn.Embedding(num_queries, self.d_model)

    def transform(self, image: Tensor, padding_mask: Tensor | None = None) -> Decoded:
        """Encode a map (B, d_model, h, w) and decode the queries."""
        size = image.shape[-2:]
        bias = None
        if padding_mask is not None:
            padding_mask = resize_mask(padding_mask, size)
            bias = padding_bias(padding_mask.flatten(1), image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=padding_mask, device=image.device)
        positions = positions.flatten(1, 2).to(image.dtype)  # (B or 1, h * w, d_model)

        memory = self.encoder(image.flatten(2).transpose(1, 2), positions, bias=bias)
        queries = self.query_embed.weight.expand(len(image), -1, -1)  # (B, Q, d_model)
        states = self.decoder(
            torch.zeros_like(queries), memory, positions=queries, memory_positions=positions, memory_bias=bias
        )
        return Decoded(states, memory.transpose(1, 2).unflatten(2, size), padding_mask)


@HEADS.register
class DETRHead(TransformerHead):
    """Carion et al. 2020, https://arxiv.org/abs/2005.12872. Reads the coarsest map.

    Args:
        feature_info: of the neck's maps; the coarsest must have `d_model` channels.
        num_classes: without the no-object class.
        num_queries: boxes predicted per image.
    Raises:
        ConfigError: the map has other than `d_model` channels.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: EncoderDecoderSettings = EncoderDecoderSettings(),
    ):
        super().__init__()
        d_model = settings.d_model
        self.feature_name, info = list(feature_info.items())[-1]
        if info.channels != d_model:
            raise ConfigError(
                f"DETRHead: d_model={d_model}, but feature {self.feature_name!r} has {info.channels} channels: "
                "set both to the same number (model.neck.out_channels, model.head.d_model)."
            )
        if num_queries < 1:
            raise ConfigError(f"DETRHead: num_queries={num_queries}, expected at least 1.")
        self.num_heads = settings.num_heads
        self.make_transformer(num_queries, settings)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.bbox_embed = MLP((d_model, d_model, d_model, 4))

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            aux_outputs: the same two of each decoder layer but the last, first layer first.
        """
        return self.predict(self.decode(features, padding_mask).states)

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Decoded:
        """Return the decoded queries, before classes and boxes are predicted; arguments as of `forward`."""
        return self.transform(features[self.feature_name], padding_mask)

    def predict(self, states: Tensor) -> dict[str, Any]:
        """Return classes and boxes of all layers as `forward` does, from (layers, B, Q, d_model)."""
        logits, boxes = self.class_embed(states), self.bbox_embed(states).sigmoid()
        outputs = [dict(pred_logits=l, pred_boxes=b) for l, b in zip(logits.unbind(), boxes.unbind())]
        return dict(**outputs[-1], aux_outputs=outputs[:-1])
