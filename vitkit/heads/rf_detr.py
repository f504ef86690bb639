"""RF-DETR (Robinson et al. 2025, https://arxiv.org/abs/2511.09554), with the decoder of LW-DETR (Chen et al. 2024,
https://arxiv.org/abs/2406.03459): a few layers on a single map of a plain transformer, without an encoder."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import (
    Levels,
    anchor_boxes,
    box_codes,
    check_locations,
    flatten_levels,
    gather_rows,
    init_deformable,
)
from vitkit.nn.detection import box_head, check_at_least_1, check_channels, class_head
from vitkit.nn.layers import MLP, FeedForward, init_xavier
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import LocationSelection, select_locations
from vitkit.ops.keypoints import KEYPOINT_MAP
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo

if TYPE_CHECKING:
    from vitkit.nn.query_keypoints import QueryKeypoints


@HEADS.register
class RFDETRHead(QueryHead):
    """Selects a box for each learned query, decodes the queries around these boxes, and predicts boxes relative to
    them; optionally with a mask, or with keypoints, for each query.

    Groups of queries that exist only in training (`QueryGroups`) select their boxes with layers of their own.

    Args:
        feature_info: description of the neck's maps; each must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        num_heads: number of heads of the self-attention; `num_cross_heads` of the attention to the image.
        num_points: number of locations that each of these samples on each map.
        masks: whether there is a mask for each query, at a quarter of the image's resolution (RF-DETR-Seg).
        num_keypoints: number of keypoints of each object, which the model sets; None: there are none. They attend to
            the neck's map "keypoints", if there is one (`C2fProjectionPair`).
        keypoint_classes: labels of the objects with keypoints, each with points of its own; None: all, with the same
            points.
    Raises:
        ConfigError: a map does not have `d_model` channels, there are no queries or layers, the stride of the only
            map that masks are made from is not a multiple of 4, there are masks and keypoints; see `QueryKeypoints`.
    """

    query_outputs = ("pred_logits", "pred_boxes", "reference_points")
    reference = "boxes"
    selects_boxes = True
    attends_in_parts = True
    rounds_padding = False

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        num_cross_heads: int = 16,
        num_points: int = 2,
        d_ffn: int = 2048,
        dropout: float = 0.0,
        num_decoder_layers: int = 3,
        masks: bool = False,
        num_keypoints: int | None = None,
        keypoint_classes: Sequence[int] | None = None,
    ):
        super().__init__()
        check_channels("RFDETRHead", feature_info, d_model)
        check_at_least_1("RFDETRHead", num_queries=num_queries, num_decoder_layers=num_decoder_layers)
        self.d_model, self.num_classes, self.num_queries = d_model, num_classes, num_queries
        self.learned_channels = 4 + d_model
        self.has_keypoints = num_keypoints is not None
        if masks and self.has_keypoints:
            raise ConfigError("RFDETRHead: masks=True and num_keypoints exclude each other.")
        self.box_maps = [name for name in feature_info if not self.has_keypoints or name != KEYPOINT_MAP]
        self.strides = [feature_info[name].stride for name in self.box_maps]
        self.proposals = self.make_proposals()
        self.query_embed = self.learned_vectors(num_queries)
        num_levels = len(self.box_maps)
        layer = dict(num_heads=num_heads, num_cross_heads=num_cross_heads, num_points=num_points, dropout=dropout)
        layers = [RFDETRDecoderLayer(d_model, num_levels, **layer, d_ffn=d_ffn) for _ in range(num_decoder_layers)]
        self.decoder = RFDETRDecoder(layers, d_model)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)
        if masks and len(feature_info) != 1:
            raise ConfigError(f"RFDETRHead: masks=True needs a single map; the neck returns {', '.join(feature_info)}.")
        self.add_masks("BlockMasks" if masks else None, feature_info, num_decoder_layers)
        self.keypoint_head = None
        if num_keypoints is not None:
            from vitkit.nn.query_keypoints import QueryKeypoints  # heads without keypoints never import it

            sizes = dict(num_layers=num_decoder_layers, num_levels=num_levels)
            self.keypoint_head = QueryKeypoints(
                d_model, num_classes, num_keypoints, classes=keypoint_classes, **sizes, **layer
            )
            self.query_outputs = (*self.query_outputs, "pred_keypoints")
            self.shared_outputs = (*self.shared_outputs, "keypoint_groups")

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query, from the neck's maps (B, d_model, h, w); see `QueryHead`.

        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        maps = {name: features[name] for name in self.box_maps}
        levels = flatten_levels(maps, None, padding_mask, strides=self.strides)
        memory = levels.tokens  # (B, S, d_model)
        stages = [self.proposals, *([] if added is None else added.proposals)]
        selections, boxes = zip(*(stage(memory, levels, self.num_queries) for stage in stages))
        queries = self.make_queries(self.query_embed.weight.expand(memory.shape[0], -1, -1), boxes[0])
        if added is not None:
            queries = added.join(queries, self, torch.cat(boxes[1:], dim=1) if boxes[1:] else None)
        # For each layer (B, Q, d_model), and with keypoints (B, Q, points, d_model).
        states, points = self.decoder(queries, memory, levels, self.keypoint_head, features.get(KEYPOINT_MAP))
        layers = [
            {
                "pred_logits": self.class_embed(x),
                "pred_boxes": refine_boxes(queries.references, self.bbox_embed(x)),
                "reference_points": queries.references,
            }
            for x in states
        ]
        if self.mask_head is not None:
            first_states = [selection.pop("states") for selection in selections]
            masks = self.mask_head(features, states, padding_mask, first_states)
            selections = [selection | factors for selection, factors in zip(selections, masks)]
            layers = [layer | factors for layer, factors in zip(layers, masks[len(selections) :])]
            if not self.training:
                layers[-1]["pred_masks"] = mask_logits(layers[-1]["mask_embed"], layers[-1]["mask_features"])
        if self.keypoint_head is not None:
            add, predict = self.keypoint_head.with_keypoints, self.keypoint_head.predict
            layers = [add(layer, predict(x, queries.references)) for layer, x in zip(layers, points)]
            first = self.keypoint_head.predict_first
            selections = [
                add(selection, first(stage.keypoint_embed, selection.pop("states"), selection["pred_boxes"]))
                for stage, selection in zip(stages, selections)
            ]
        return {
            **layers[-1],
            # pred_logits (B, Q, num_classes), one sigmoid per class
            # pred_boxes (B, Q, 4) cxcywh, relative to the unpadded image
            # reference_points (B, Q, 4), the boxes that all layers sampled in
            # and with masks, mask_embed (B, Q, C) and mask_features (B, C, h, w), and when not training their product,
            # pred_masks (B, Q, h, w) logits
            # and with keypoints, pred_keypoints and keypoint_groups, see `QueryKeypoints.with_keypoints`
            "aux_outputs": layers[:-1],  # the same of each layer but the last, first layer first
            "training_outputs": list(selections),  # the predictions of each group's first stage, (B, Q, ...)
        }

    def make_proposals(self) -> "GroupSelection":
        """See `QueryHead`."""
        return GroupSelection(self.d_model, self.num_classes, keypoints=self.has_keypoints)

    def learned_vectors(self, count: int) -> nn.Embedding:
        """Return the learned vectors of queries: 4 numbers that refine their boxes, initially 0, and their content."""
        embedding = super().learned_vectors(count)
        with torch.no_grad():
            embedding.weight[:, :4] = 0
        return embedding

    def make_queries(self, learned: Tensor, boxes: Tensor) -> Queries:
        """Return queries with learned content at selected boxes that learned numbers refine; see `QueryHead`."""
        deltas, content = learned.split((4, self.d_model), dim=-1)
        return Queries(content, references=refine_boxes(boxes, deltas))


class RFDETRDecoder(nn.Module):
    """Decoder whose layers all attend around the initial boxes of the queries, which also give their positions."""

    def __init__(self, layers: "Sequence[RFDETRDecoderLayer]", d_model: int):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(d_model)
        self.ref_point_head = MLP((2 * d_model, d_model, d_model))
        init_deformable(self.layers)
        init_xavier(self.ref_point_head)

    def forward(
        self,
        queries: Queries,
        memory: Tensor,
        levels: Levels,
        keypoints: "QueryKeypoints | None" = None,
        point_map: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the normalized states (B, L, d_model) of the queries after each layer, and those of their keypoints.

        Args:
            keypoints: what decodes the queries' keypoints in turn with the queries; None: there are none.
            point_map: (B, d_model, h, w), which these attend to, of the memory's size; None: the memory.
        """
        x, states, point_states = queries.content, [], []
        around = levels.around(queries.references)
        # The original encodes boxes of padded maps, but makes all images square, without padding. Boxes of the image
        # make results independent of padding.
        codes = box_codes(queries.references[:, :, None], x.shape[-1])
        positions = self.ref_point_head(codes.to(x.dtype))
        points = None if keypoints is None else keypoints.queries(x)
        point_memory = memory if point_map is None else point_map.flatten(2).transpose(1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x, memory, positions=positions, bias=queries.bias, num_parts=queries.num_parts, **around)
            if points is not None:
                x, points = keypoints.layers[i](
                    x,
                    points,
                    point_memory,
                    positions=positions,
                    point_positions=keypoints.positions,
                    bias=keypoints.bias,
                    **around,
                )
                point_states.append(points)
            states.append(self.norm(x))
        return states, point_states


class RFDETRDecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(
        self,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int,
        num_cross_heads: int,
        num_points: int,
        d_ffn: int,
        dropout: float,
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_cross_heads, num_levels=num_levels, num_points=num_points
        )
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
        # Not `DeformableDecoderLayer`, as checkpoints number the norms otherwise: there norm1 is the cross-attention's.
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        *,
        positions: Tensor,
        reference_points: Tensor,
        shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
        bias: Tensor | None = None,
        num_parts: int = 1,
    ) -> Tensor:
        """Apply self-attention, cross-attention to the memory, and the feed-forward network.

        Args:
            num_parts: number of equal parts of the L queries that do not see each other.
            The others are as in `DeformableDecoderLayer`.
        """
        parts, qk_parts = (y.unflatten(1, (num_parts, -1)).flatten(0, 1) for y in (x, x + positions))
        attended = self.self_attn(qk_parts, qk_parts, parts, bias=bias)
        x = self.norm1(x + self.dropout(attended.unflatten(0, (-1, num_parts)).flatten(1, 2)))
        attended = self.cross_attn(
            x + positions, memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.ffn(x)))


class GroupSelection(LocationSelection):
    """The first stage of a group of queries: these start from the boxes of the best locations, not from contents."""

    def __init__(self, d_model: int, num_classes: int, *, keypoints: bool = False):
        super().__init__("RF-DETR", d_model, num_classes)
        if keypoints:
            from vitkit.nn.query_keypoints import QueryKeypoints

            self.keypoint_embed = QueryKeypoints.make_embed(d_model)

    def forward(self, memory: Tensor, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Tensor]:
        """Select the locations with the highest probability of any class.

        Args:
            memory: (B, S, d_model), the tokens of `levels`.
        Returns:
            the predictions at the selected locations, as one of `training_outputs`, and their states.
            boxes_cxcywh: (B, num_queries, 4), without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations(self.owner, levels, num_queries)
        anchors, unusable = (x.expand(memory.shape[0], -1, -1) for x in anchor_boxes(levels))
        anchors = anchors.masked_fill(unusable, 0)  # their boxes have size 0
        memory = memory.masked_fill(unusable, 0)
        states, logits, best = select_locations(self, memory, unusable[..., 0], num_queries)
        # Only the selected locations have a loss, so the boxes of others need not be computed.
        boxes = refine_boxes(gather_rows(anchors, best), self.bbox_embed(states))
        selection = {
            "name": "enc",
            "states": states,  # (B, Q, d_model)
            "pred_logits": logits,  # (B, Q, num_classes)
            "pred_boxes": boxes,  # (B, Q, 4)
        }
        return selection, boxes.detach()


def refine_boxes(boxes: Tensor, deltas: Tensor) -> Tensor:
    """Move boxes (..., 4) cxcywh by multiples of their size, and scale them exponentially."""
    deltas = deltas.to(torch.promote_types(deltas.dtype, torch.float32))
    centers, sizes = boxes.split(2, dim=-1)
    shifts, scales = deltas.split(2, dim=-1)
    return torch.cat((centers + shifts * sizes, sizes * scales.exp()), dim=-1)
