"""RT-DETR (Zhao et al. 2023, https://arxiv.org/abs/2304.08069): queries start from the encoder's best locations."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import (
    DeformableDecoderLayer,
    Levels,
    anchor_boxes,
    check_locations,
    flatten_levels,
    gather_rows,
    in_padded_maps,
    init_deformable,
)
from vitkit.nn.detection import box_head, boxes_around, class_head
from vitkit.nn.layers import MLP, checkpoint_block, init_xavier
from vitkit.nn.queries import AddedQueries, Queries, QueryHead
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class RTDETRHead(QueryHead):
    """RT-DETR's decoder, which reads all maps of the hybrid encoder, and its predictions.

    Its contrastive denoising is a set of training queries, see `BoxDenoising`.

    Args:
        feature_info: description of the neck's maps, fine to coarse.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        d_model, num_heads, num_points, d_ffn, dropout: of all layers, see `vitkit.nn.deformable_transformer`.
    Raises:
        ConfigError: there are no queries.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    reference = "boxes"
    selects_boxes = True
    makes_queries = False

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
        dropout: float = 0.0,
        num_decoder_layers: int = 6,
    ):
        super().__init__()
        if num_queries < 1:
            raise ConfigError(f"RTDETRHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries = d_model, num_queries
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        self.input_proj = nn.ModuleList(
            nn.Sequential(nn.Conv2d(info.channels, d_model, 1, bias=False), nn.BatchNorm2d(d_model))
            for info in feature_info.values()
        )
        self.proposals = LocationSelection(d_model, num_classes)
        layers = [DeformableDecoderLayer(d_model, len(feature_info), **layer) for _ in range(num_decoder_layers)]
        self.decoder = RTDETRDecoder(layers, d_model)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in layers)
        init_deformable(self.decoder.layers)

    def forward(
        self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None, *, added: AddedQueries | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            features: the neck's maps, (B, channels, h, w).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
            added: other queries, which precede the head's own in the outputs.
        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        maps = {name: project(features[name]) for name, project in zip(features, self.input_proj)}
        levels = flatten_levels(maps, None, padding_mask)
        memory = levels.tokens  # (B, S, d_model)
        selection, queries = self.proposals(memory, levels, self.num_queries)
        if added is not None:
            queries = added.join(queries, self)
        decoded = self.decoder(queries, memory, levels)
        layers = [
            {"pred_logits": class_embed(states), "pred_boxes": boxes, "reference_points": references}
            for class_embed, (states, references, boxes) in zip(self.class_embed, decoded)
        ]
        return {
            "pred_logits": layers[-1]["pred_logits"],  # (B, Q, num_classes), one sigmoid per class
            "pred_boxes": layers[-1]["pred_boxes"],  # (B, Q, 4) cxcywh in 0..1 of the un-padded image
            "reference_points": layers[-1]["reference_points"],  # (B, Q, 4), the boxes that the layer sampled in
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            "training_outputs": [selection],  # the encoder's predictions at the selected locations, (B, Q, ...)
        }


class RTDETRDecoder(nn.Module):
    """Decoder that computes queries' positions from the numbers of their boxes, and refines these in each layer."""

    def __init__(self, layers: list[DeformableDecoderLayer], d_model: int):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in layers)
        self.query_pos_head = MLP((4, 2 * d_model, d_model))
        init_xavier(self.query_pos_head)

    def forward(self, queries: Queries, memory: Tensor, levels: Levels) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Decode the queries with every layer.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
        Returns:
            for each layer, the states (B, L, d_model), the boxes (B, L, 4) that it attended in, and the boxes that it
            predicts, cxcywh in 0..1.
        """
        x, references = queries.content, queries.references
        decoded, predicted_from = [], references
        for layer, bbox_embed in zip(self.layers, self.bbox_embed):
            x = checkpoint_block(
                layer,
                x,
                memory,
                positions=self.query_pos_head(references.to(x.dtype)),
                shapes=levels.shapes,
                padding_mask=levels.padding_mask,
                reference_points=in_padded_maps(references, levels.valid_ratios),
                bias=queries.bias,
            )
            deltas = bbox_embed(x)
            decoded.append((x, references, boxes_around(predicted_from, deltas)))
            # With its gradient, the next layer's loss also trains this layer's box.
            predicted_from = boxes_around(references, deltas)
            references = predicted_from.detach()
        return decoded


class LocationSelection(nn.Module):
    """Query selection (section 4.3): queries start from the content and the box of the best locations.

    The training of their class scores by the IoU ("uncertainty-minimal") is the criterion's varifocal loss.
    """

    def __init__(self, d_model: int, num_classes: int):
        super().__init__()
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)

    def forward(self, memory: Tensor, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Queries]:
        """Select the locations with the highest probability of any class.

        Args:
            memory: (B, S, d_model), the tokens of `levels`.
        Returns:
            the predictions at the selected locations, as one of `training_outputs`.
            queries: (B, num_queries, ...) without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations("RT-DETR", levels, num_queries)
        anchors, unusable = (x.expand(memory.shape[0], -1, -1) for x in anchor_boxes(levels))
        # An unusable location stays at infinity: its box is the constant 1, without gradient.
        anchor_logits = torch.logit(anchors).masked_fill(unusable, torch.inf)
        x = self.enc_output_norm(self.enc_output(memory.masked_fill(unusable, 0)))
        logits = self.class_embed(x)
        best = logits.amax(-1).topk(num_queries, dim=1).indices
        # Only the selected locations have a loss, so the boxes of others need not be computed.
        content = gather_rows(x, best)
        boxes = (self.bbox_embed(content).float() + gather_rows(anchor_logits, best)).sigmoid()
        selection = {
            "name": "enc",
            "pred_logits": gather_rows(logits, best),  # (B, Q, num_classes)
            "pred_boxes": boxes,  # (B, Q, 4)
            "aux_outputs": [],
            "matches": None,
            "repeats": 1,
            "class_agnostic": False,
        }
        return selection, Queries(content.detach(), references=boxes.detach())
