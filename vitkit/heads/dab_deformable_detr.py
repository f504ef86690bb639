"""DAB-Deformable-DETR (Liu et al. 2022, https://arxiv.org/abs/2201.12329): queries are learned anchor boxes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import (
    DeformableDecoderLayer,
    DeformableEncoder,
    Levels,
    box_codes,
    flatten_levels,
    init_deformable,
)
from vitkit.nn.detection import box_head, boxes_around, check_channels, class_head
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class DABDeformableDETRHead(QueryHead):
    """A deformable transformer whose queries are anchor boxes, learned and then refined layer by layer.

    Args:
        feature_info: description of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, num_points, d_ffn, dropout: of all layers, see `vitkit.nn.deformable_transformer`.
    Raises:
        ConfigError: a map does not have `d_model` channels, or there are no queries.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    reference = "boxes"

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 1024,
        dropout: float = 0.1,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
    ):
        super().__init__()
        check_channels("DABDeformableDETRHead", feature_info, d_model)
        if num_queries < 1:
            raise ConfigError(f"DABDeformableDETRHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model + 4
        num_levels = len(feature_info)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(num_encoder_layers, d_model, num_levels, **layer)
        layers = [DeformableDecoderLayer(d_model, num_levels, **layer) for _ in range(num_decoder_layers)]
        self.decoder = DABDecoder(layers, d_model)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in range(num_decoder_layers))
        self.query_embed = nn.Embedding(num_queries, d_model)
        self.reference_boxes = nn.Embedding(num_queries, 4)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query, from the neck's maps (B, d_model, h, w); see `QueryHead`."""
        levels = flatten_levels(features, self.level_embed, padding_mask, position_offset=-0.5)
        memory = self.encoder(levels)  # (B, S, d_model)
        learned = torch.cat((self.query_embed.weight, self.reference_boxes.weight), dim=1)
        queries = self.make_queries(learned.expand(memory.shape[0], -1, -1))
        if added is not None:
            queries = added.join(queries, self)
        decoded = self.decoder(queries, memory, levels)
        layers = [
            {"pred_logits": class_embed(states), "pred_boxes": boxes, "reference_points": references}
            for class_embed, (states, references, boxes) in zip(self.class_embed, decoded)
        ]
        return {
            "pred_logits": layers[-1]["pred_logits"],  # (B, Q, num_classes), one sigmoid per class
            "pred_boxes": layers[-1]["pred_boxes"],  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "reference_points": layers[-1]["reference_points"],  # (B, Q, 4), the boxes that the layer sampled in
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
        }

    def make_queries(self, learned: Tensor, boxes: None = None) -> Queries:
        """Return queries whose content and box are learned, from (B, Q, d_model + 4); see `QueryHead`."""
        content, boxes = learned.split((self.d_model, 4), dim=-1)
        return Queries(content, references=boxes.sigmoid())


class DABDecoder(nn.Module):
    """Decoder that computes queries' positions from their boxes, and refines these layer by layer."""

    def __init__(self, layers: list[DeformableDecoderLayer], d_model: int):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in layers)
        self.ref_point_head = MLP((2 * d_model, d_model, d_model))
        init_xavier(self.ref_point_head)

    def forward(self, queries: Queries, memory: Tensor, levels: Levels) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Decode the queries with every layer.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        Returns:
            for each layer, the states (B, L, d_model), the boxes (B, L, 4) that it attended in, and the boxes that it
            predicts, cxcywh in 0..1.
        """
        x, references = queries.content, queries.references
        decoded = []
        for layer, bbox_embed in zip(self.layers, self.bbox_embed):
            around = levels.around(references)
            positions = self.ref_point_head(box_codes(around["reference_points"], x.shape[-1]).to(x.dtype))
            x = layer(x, memory, positions=positions, bias=queries.bias, **around)
            boxes = boxes_around(references, bbox_embed(x))
            decoded.append((x, references, boxes))
            references = boxes.detach()
        return decoded
