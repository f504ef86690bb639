"""Deformable DETR (Zhu et al. 2021, https://arxiv.org/abs/2010.04159): attention to a few locations of several maps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import (
    DeformableDecoderLayer,
    DeformableEncoder,
    Levels,
    check_locations,
    flatten_levels,
    gather_rows,
    init_deformable,
)
from vitkit.nn.detection import box_head, boxes_around, check_channels, class_head
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import usable_locations
from vitkit.registry import HEADS, Spec
from vitkit.structures import FeatureInfo


@HEADS.register
class DeformableDETRHead(QueryHead):
    """Deformable DETR's transformer, which reads all maps of the neck, and its predictions.

    Args:
        feature_info: description of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, num_points, d_ffn, dropout: of all layers, see `vitkit.nn.deformable_transformer`.
        refine_boxes: whether the boxes of each layer are the references of the next one (appendix A.4).
        two_stage: whether queries start from the boxes that the encoder proposes instead of learned points (appendix
            A.4); needs `refine_boxes`.
        masks: spec of what predicts a mask for each query: "BlockMasks" or "PyramidMasks"; None: there are no masks.
    Raises:
        ConfigError: a map does not have `d_model` channels, there are no queries, or two stages without refinement.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")

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
        refine_boxes: bool = False,
        two_stage: bool = False,
        masks: Spec | None = None,
    ):
        super().__init__()
        check_channels("DeformableDETRHead", feature_info, d_model)
        if num_queries < 1:
            raise ConfigError(f"DeformableDETRHead: num_queries={num_queries}, expected at least 1.")
        if two_stage and not refine_boxes:
            raise ConfigError("DeformableDETRHead: two_stage=True needs refine_boxes=True.")
        self.d_model, self.num_queries, self.two_stage = d_model, num_queries, two_stage
        self.learned_channels = 0 if two_stage else 2 * d_model
        self.reference, self.selects_boxes = ("boxes", True) if two_stage else ("points", False)
        num_levels = len(feature_info)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(num_encoder_layers, d_model, num_levels, **layer)
        layers = [DeformableDecoderLayer(d_model, num_levels, **layer) for _ in range(num_decoder_layers)]
        self.decoder = DeformableDecoder(layers, d_model, refine_boxes=refine_boxes)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in self.decoder.bbox_embed)
        if two_stage:
            self.proposals = EncoderProposals(d_model, num_classes)
        else:
            self.query_embed = nn.Embedding(num_queries, 2 * d_model)
            self.reference_points = nn.Linear(d_model, 2)
            # Initial boxes are a tenth of the image wide, around their point.
            nn.init.constant_(self.decoder.bbox_embed[0].layers[-1].bias[2:], -2.0)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)
        if not two_stage:
            nn.init.xavier_uniform_(self.reference_points.weight)
            nn.init.zeros_(self.reference_points.bias)
        self.add_masks(masks, feature_info, num_decoder_layers)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query, from the neck's maps (B, d_model, h, w); see `QueryHead`.

        Raises:
            DataError: with two stages, the maps have fewer locations than there are queries.
        """
        levels = flatten_levels(features, self.level_embed, padding_mask, position_offset=-0.5)
        memory = self.encoder(levels)  # (B, S, d_model)
        first_stage, selected = [], None
        if self.two_stage:
            num_selected = self.num_queries + (0 if added is None else added.num_selected)
            proposals, boxes = self.proposals(memory, levels, num_selected)
            first_stage.append(proposals)
            boxes, selected = boxes[:, : self.num_queries], boxes[:, self.num_queries :]
            queries = self.make_queries(None, boxes)
        else:
            queries = self.make_queries(self.query_embed.weight.expand(memory.shape[0], -1, -1))
        if added is not None:
            queries = added.join(queries, self, selected)
        decoded = self.decoder(queries, memory, levels)
        layers = [
            {
                # (B, Q, num_classes), one sigmoid per class
                "pred_logits": self.class_embed[i % len(self.class_embed)](layer.states),
                "pred_boxes": layer.boxes_cxcywh,  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
                "reference_points": layer.references,  # (B, Q, 2 or 4), what the layer sampled around
            }
            for i, layer in enumerate(decoded)
        ]
        outputs = {
            **layers[-1],
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            "training_outputs": first_stage,  # with two stages, the predictions for all locations, (B, S, ...)
        }
        maps = levels.split_maps(memory, features)
        return self.with_masks(outputs, maps, [layer.states for layer in decoded], padding_mask)

    def make_queries(self, learned: Tensor | None, boxes: Tensor | None = None) -> Queries:
        """Return queries at learned points, from (B, Q, 2 * d_model), or at selected boxes; see `QueryHead`."""
        if self.two_stage:
            positions, content = self.proposals.encode(boxes)
            return Queries(content, positions, references=boxes)
        positions, content = learned.chunk(2, dim=-1)
        return Queries(content, positions, references=self.reference_points(positions).float().sigmoid())

    def queries_at(self, content: Tensor, boxes: Tensor) -> Queries:
        """See `QueryHead`."""
        return Queries(content, self.proposals.encode(boxes)[0], references=boxes)


class DecodedLayer(NamedTuple):
    """The output of a decoder layer."""

    states: Tensor
    """(B, L, d_model)."""
    references: Tensor
    """(B, L, 2 or 4): the points or boxes cxcywh that the layer attended around."""
    boxes_cxcywh: Tensor
    """(B, L, 4) in 0..1 of the unpadded image."""


class DeformableDecoder(nn.Module):
    """Decoder whose queries attend to locations around their references, and predict boxes relative to them.

    Without `refine_boxes` all layers share one box head and the initial references.
    """

    def __init__(self, layers: list[DeformableDecoderLayer], d_model: int, *, refine_boxes: bool):
        super().__init__()
        self.refine_boxes = refine_boxes
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in range(len(layers) if refine_boxes else 1))

    def forward(self, queries: Queries, memory: Tensor, levels: Levels) -> list[DecodedLayer]:
        """Decode the queries with every layer.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        """
        x, references = queries.content, queries.references
        decoded = []
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, positions=queries.positions, bias=queries.bias, **levels.around(references))
            boxes = boxes_around(references, self.bbox_embed[i % len(self.bbox_embed)](x))
            decoded.append(DecodedLayer(x, references, boxes))
            if self.refine_boxes:
                references = boxes.detach()
        return decoded


class EncoderProposals(nn.Module):
    """The first of two stages (appendix A.4): each location proposes a box; the best are decoded."""

    def __init__(self, d_model: int, num_classes: int):
        super().__init__()
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)
        self.pos_trans = nn.Linear(2 * d_model, 2 * d_model)
        self.pos_trans_norm = nn.LayerNorm(2 * d_model)
        nn.init.xavier_uniform_(self.pos_trans.weight)

    def forward(self, memory: Tensor, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Tensor]:
        """Propose a box at each location, and select those with the highest logit of the first class, any object.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        Returns:
            the proposals, as one of `training_outputs`.
            boxes_cxcywh: (B, num_queries, 4), without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations("two-stage Deformable DETR", levels, num_queries)
        memory, anchor_logits = usable_locations(memory, levels)
        x = self.enc_output_norm(self.enc_output(memory))
        logits = self.class_embed(x)
        box_logits = self.bbox_embed(x).float() + anchor_logits
        best = logits[..., 0].topk(num_queries, dim=1).indices
        proposals = {
            "name": "enc",
            "pred_logits": logits,  # (B, S, num_classes)
            "pred_boxes": box_logits.sigmoid(),  # (B, S, 4)
            "class_agnostic": True,
        }
        return proposals, gather_rows(box_logits.detach(), best).sigmoid()

    def encode(self, boxes_cxcywh: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and the content, (B, Q, d_model) each, of queries that start from boxes."""
        codes = sine_positions_boxes(boxes_cxcywh, self.enc_output.in_features).to(self.pos_trans.weight.dtype)
        return self.pos_trans_norm(self.pos_trans(codes)).chunk(2, dim=-1)
