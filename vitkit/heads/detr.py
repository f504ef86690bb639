"""DETR (Carion et al. 2020, https://arxiv.org/abs/2005.12872): a transformer over one map, with object queries."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.detection import check_channels
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.transformer import TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo

POSITIONS = ("sine", "sine_input", "learned", "none")
NUM_LEARNED = 50
"""Number of rows and columns with a learned position, as in the original; rows and columns beyond use the last one."""


@HEADS.register
class DETRHead(QueryHead):
    """DETR's transformer, which reads the coarsest map, and its predictions.

    Args:
        feature_info: description of the neck's maps; the coarsest must have `d_model` channels.
        num_classes: number of classes, without "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, d_ffn, dropout, norm_first, activation: of all layers, see `vitkit.nn.transformer`.
        positions: encoding of the map's locations (table 3): "sine": sines added to the keys and queries of every
            attention; "sine_input": once to the encoder's input; "learned": a learned vector for each row and column
            instead of the sines; or "none".
    Raises:
        ConfigError: the map does not have `d_model` channels, there are no queries, or `positions` is unknown.
    """

    query_outputs = ("pred_logits", "pred_boxes", "queries")

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
        activation: Literal["relu", "gelu", "silu"] = "relu",
        positions: Literal["sine", "sine_input", "learned", "none"] = "sine",
    ):
        super().__init__()
        self.feature_name, info = list(feature_info.items())[-1]
        check_channels("DETRHead", {self.feature_name: info}, d_model)
        if num_queries < 1:
            raise ConfigError(f"DETRHead: num_queries={num_queries}, expected at least 1.")
        if positions not in POSITIONS:
            raise ConfigError(f"DETRHead: positions={positions!r}, expected one of {', '.join(POSITIONS)}.")
        self.d_model, self.num_heads, self.num_queries = d_model, num_heads, num_queries
        self.learned_channels = d_model
        self.positions = positions
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.encoder = TransformerEncoder(num_encoder_layers, d_model, **layer)
        self.decoder = TransformerDecoder(num_decoder_layers, d_model, **layer)
        init_xavier(self.encoder, self.decoder)
        if positions == "learned":
            self.row_embed = nn.Embedding(NUM_LEARNED, d_model // 2)
            self.col_embed = nn.Embedding(NUM_LEARNED, d_model // 2)
            nn.init.uniform_(self.row_embed.weight)
            nn.init.uniform_(self.col_embed.weight)
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.bbox_embed = MLP((d_model, d_model, d_model, 4))

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            features: the neck's maps, (B, d_model, h, w).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
            added: other queries, which precede the head's own in the outputs.
        """
        image = features[self.feature_name]
        size = image.shape[-2:]
        padding = None if padding_mask is None else resize_mask(padding_mask, size)  # (B, h, w)
        memory_bias = None if padding is None else padding_bias(padding.flatten(1), image.dtype)
        positions = self._encode_positions(image, padding)  # (B or 1, h * w, d_model)
        tokens = image.flatten(2).transpose(1, 2)  # (B, h * w, d_model)
        if self.positions == "sine_input":
            tokens, positions = tokens + positions, None

        memory = self.encoder(tokens, positions, bias=memory_bias)
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
        boxes = self.bbox_embed(states)
        # bfloat16 would round by up to 1 / 512.
        boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32)).sigmoid().unbind()
        return {
            "pred_logits": logits[-1],  # (B, Q, num_classes + 1), the last class being "no object"
            "pred_boxes": boxes[-1],  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "aux_outputs": [  # the same of each decoder layer but the last, first layer first
                {"pred_logits": l, "pred_boxes": b} for l, b in zip(logits[:-1], boxes[:-1])
            ],
            "queries": states[-1],  # (B, Q, d_model), decoded
            "memory": memory,  # (B, h * w, d_model), the encoded map
        }

    def make_queries(self, learned: Tensor, boxes: None = None) -> Queries:
        """Return queries with learned positions, (B, Q, d_model), and without content; see `QueryHead`."""
        return Queries(content=torch.zeros_like(learned), positions=learned)

    def _encode_positions(self, image: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return the positions of a map's locations, (B or 1, h * w, d_model); None if the head uses none."""
        size = image.shape[-2:]
        if self.positions == "none":
            return None
        if self.positions == "learned":
            rows, columns = (torch.arange(n, device=image.device).clamp(max=NUM_LEARNED - 1) for n in size)
            parts = self.row_embed(rows)[:, None], self.col_embed(columns)[None]
            return torch.cat([part.expand(*size, -1) for part in parts], dim=-1).flatten(0, 1)[None].to(image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=padding, device=image.device)
        return positions.flatten(1, 2).to(image.dtype)
