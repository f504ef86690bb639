"""DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605): boxes are selected, contents learned, refined jointly."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import (
    DeformableDecoderLayer,
    DeformableEncoder,
    Levels,
    anchor_boxes,
    box_codes,
    check_locations,
    flatten_levels,
    gather_rows,
    in_padded_maps,
    init_deformable,
)
from vitkit.nn.detection import box_head, boxes_around, check_channels, class_head
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo

LOGIT_EPS = 1e-3
"""Distance to 0 and 1 to which coordinates of references are clamped, so that their logits are finite."""


@HEADS.register
class DINOHead(QueryHead):
    """DINO's transformer, which reads all maps of the neck, and its predictions.

    Its contrastive denoising is a set of training queries, see `BoxDenoising`.

    Args:
        feature_info: description of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, num_points, d_ffn, dropout: of all layers, see `vitkit.nn.deformable_transformer`.
        share_heads: whether all decoder layers predict with the same heads, as in the published models.
        look_forward_twice: whether the loss of a layer's boxes also trains the previous layer (section 3.5).
    Raises:
        ConfigError: a map does not have `d_model` channels, or there are no queries.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    reference = "boxes"
    selects_boxes = True

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 2048,
        dropout: float = 0.0,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        share_heads: bool = True,
        look_forward_twice: bool = True,
    ):
        super().__init__()
        check_channels("DINOHead", feature_info, d_model)
        if num_queries < 1:
            raise ConfigError(f"DINOHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model
        num_levels = len(feature_info)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        num_predictors = 1 if share_heads else num_decoder_layers
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(num_encoder_layers, d_model, num_levels, **layer)
        layers = [DeformableDecoderLayer(d_model, num_levels, **layer) for _ in range(num_decoder_layers)]
        self.decoder = DINODecoder(layers, d_model, num_predictors, look_forward_twice=look_forward_twice)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in range(num_predictors))
        self.proposals = QuerySelection(d_model, num_classes, num_queries)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)

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
        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        levels = flatten_levels(features, self.level_embed, padding_mask, position_offset=0.0, temperature=20.0)
        memory = self.encoder(levels)  # (B, S, d_model)
        num_selected = self.num_queries + (0 if added is None else added.num_selected)
        selection, boxes = self.proposals(memory, levels, num_selected)
        learned = self.proposals.content.weight.expand(memory.shape[0], -1, -1)
        queries = self.make_queries(learned, boxes[:, : self.num_queries])
        if added is not None:
            queries = added.join(queries, self, boxes[:, self.num_queries :])
        decoded = self.decoder(queries, memory, levels)
        layers = [
            {
                "pred_logits": self.class_embed[i % len(self.class_embed)](states),
                "pred_boxes": boxes,
                "reference_points": references,
            }
            for i, (states, references, boxes) in enumerate(decoded)
        ]
        return {
            "pred_logits": layers[-1]["pred_logits"],  # (B, Q, num_classes), one sigmoid per class
            "pred_boxes": layers[-1]["pred_boxes"],  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "reference_points": layers[-1]["reference_points"],  # (B, Q, 4), the boxes that the layer sampled in
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            "training_outputs": [selection],  # the encoder's predictions at the selected locations, (B, Q, ...)
        }

    def make_queries(self, learned: Tensor, boxes: Tensor) -> Queries:
        """Return queries with learned content, (B, Q, d_model), at selected boxes; see `QueryHead`."""
        return Queries(learned, references=boxes)


class DINODecoder(nn.Module):
    """Decoder that computes queries' positions from their boxes (section 3.1), and refines these layer by layer."""

    def __init__(
        self, layers: list[DeformableDecoderLayer], d_model: int, num_predictors: int, *, look_forward_twice: bool
    ):
        super().__init__()
        self.look_forward_twice = look_forward_twice
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in range(num_predictors))
        self.norm = nn.LayerNorm(d_model)
        self.ref_point_head = MLP((2 * d_model, d_model, d_model))
        init_xavier(self.ref_point_head)

    def forward(self, queries: Queries, memory: Tensor, levels: Levels) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Decode the queries with every layer.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        Returns:
            for each layer, the normalized states (B, L, d_model), the boxes (B, L, 4) that it attended in, and the
            boxes that it predicts, cxcywh in 0..1.
        """
        x, references = queries.content, queries.references
        decoded, predicted_from = [], references
        for i, layer in enumerate(self.layers):
            reference_points = in_padded_maps(references, levels.valid_ratios)
            x = layer(
                x,
                memory,
                positions=self.ref_point_head(box_codes(reference_points, x.shape[-1]).to(x.dtype)),
                shapes=levels.shapes,
                padding_mask=levels.padding_mask,
                reference_points=reference_points,
                bias=queries.bias,
            )
            states, bbox_embed = self.norm(x), self.bbox_embed[i % len(self.bbox_embed)]
            decoded.append((states, references, boxes_around(predicted_from, bbox_embed(states), eps=LOGIT_EPS)))
            if i + 1 < len(self.layers):
                refined = boxes_around(references, bbox_embed(x), eps=LOGIT_EPS)
                references = refined.detach()
                # With its gradient, the next layer's loss also trains this layer's box ("look forward twice").
                predicted_from = refined if self.look_forward_twice else references
        return decoded


class QuerySelection(nn.Module):
    """Mixed query selection (section 3.4): queries start from the boxes of the best locations; contents are learned."""

    def __init__(self, d_model: int, num_classes: int, num_queries: int):
        super().__init__()
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)
        self.content = nn.Embedding(num_queries, d_model)
        nn.init.xavier_uniform_(self.content.weight)

    def forward(self, memory: Tensor, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Tensor]:
        """Select the locations with the highest probability of any class.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        Returns:
            the predictions at the selected locations, as one of `training_outputs`.
            boxes_cxcywh: (B, num_queries, 4), without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations("DINO", levels, num_queries)
        anchors, unusable = (x.expand(memory.shape[0], -1, -1) for x in anchor_boxes(levels))
        memory = memory.masked_fill(unusable, 0)
        # An unusable location stays at infinity: its box is the constant 1, without gradient.
        anchor_logits = torch.logit(anchors).masked_fill(unusable, torch.inf)
        # Indices have no gradient, so nothing is stored for this pass. Under `no_grad`, autocast in torch 2.6 would
        # cache weights in lower precision without a gradient, and use them below as well.
        best = self.class_embed(self.enc_output_norm(self.enc_output(memory))).amax(-1).topk(num_queries, dim=1).indices
        # Only the selected locations have a loss, so the boxes of others need not be computed.
        x = self.enc_output_norm(self.enc_output(gather_rows(memory, best)))
        box_logits = self.bbox_embed(x).float() + gather_rows(anchor_logits, best)
        boxes = box_logits.sigmoid()
        head_queries = slice(self.content.num_embeddings)  # those selected for added queries have no loss here
        selection = {
            "name": "enc",
            "pred_logits": self.class_embed(x)[:, head_queries],  # (B, Q, num_classes)
            "pred_boxes": boxes[:, head_queries],  # (B, Q, 4)
            "aux_outputs": [],
            "matches": None,
            "repeats": 1,
            "class_agnostic": False,
        }
        return selection, boxes.detach()
