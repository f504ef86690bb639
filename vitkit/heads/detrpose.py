"""DETRPose (Janampa and Pattichis 2025, https://arxiv.org/abs/2506.13027): queries are instances with their keypoints,
whose coordinates are distributions that the decoder's layers refine."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.heads.dfine import MAX_FLOAT16, Gate, map_projection
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import (
    Levels,
    check_locations,
    flatten_levels,
    gather_rows,
    in_padded_maps,
    init_deformable,
)
from vitkit.nn.detection import box_head, check_at_least_1, class_head
from vitkit.nn.layers import MLP, FeedForward, Linear, init_xavier
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import select_locations
from vitkit.ops.box_distances import distance_bins
from vitkit.ops.boxes import inverse_sigmoid
from vitkit.ops.keypoints import boxes_around_points, sigmas_of_keypoints
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo

NUM_LARGEST = 4
"""Number of channels at a keypoint that the class logits depend on."""


@HEADS.register
class DETRPoseHead(QueryHead):
    """DETRPose's decoder and its predictions, the head of ECPose.

    Each query has 1 + K tokens: that of the instance, whose class it predicts, and one for each keypoint. Denoising is
    a set of training queries, see `KeypointDenoising`.

    Args:
        feature_info: description of the neck's maps, fine to coarse.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of instances predicted per image.
        num_keypoints: K.
        num_points: locations per head and level that a token samples; a list: of each level.
        d_model, num_heads, d_ffn, dropout: of all layers, see `vitkit.nn.transformer`.
        reg_max: number of bins of each coordinate's distribution minus one; even.
        reg_scale, up: of the shifts that bins stand for, see `distance_bins`; a shift of reg_scale is the image's side.
        keeps_positions: whether the positions of keypoints stay in their tokens where a layer adds them, as in the
            original's code, which adds them in place, and so in ECPose's published weights. They are then also in the
            values of the first attention, in the residual sums, in the gate, and in the previous layer's states that
            distributions are made from. False: they are only in queries and keys, and for training from the start
            there is no reason for anything else.
    Raises:
        ConfigError: there are no queries, keypoints or layers, or an argument is out of range.
    """

    query_outputs = ("pred_logits", "pred_keypoints", "pred_boxes", "reference_points")
    reference = "keypoints"

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        num_keypoints: int = 17,
        d_model: int = 256,
        num_heads: int = 8,
        num_points: int | Sequence[int] = 4,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        num_decoder_layers: int = 4,
        reg_max: int = 32,
        reg_scale: float = 4.0,
        up: float = 0.5,
        keeps_positions: bool = True,
    ):
        super().__init__()
        numbers = dict(num_queries=num_queries, num_keypoints=num_keypoints, num_decoder_layers=num_decoder_layers)
        check_at_least_1("DETRPoseHead", **numbers)
        self.d_model, self.num_queries, self.num_keypoints, self.up = d_model, num_queries, num_keypoints, up
        # For the noise of denoising; the model sets those of its data.
        self.register_buffer("keypoint_sigmas", sigmas_of_keypoints(num_keypoints, None), persistent=False)
        self.input_proj = nn.ModuleList(map_projection(info.channels, d_model) for info in feature_info.values())
        self.proposals = KeypointSelection(d_model, num_classes, num_keypoints)
        self.instance_embed = nn.Embedding(1, d_model)
        self.keypoint_embed = nn.Embedding(num_keypoints, d_model)
        self.query_embed = nn.Embedding(num_queries, d_model)
        init_xavier(self.instance_embed, self.keypoint_embed, self.query_embed)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        layers = [
            DETRPoseDecoderLayer(d_model, len(feature_info), **layer, keeps_positions=keeps_positions)
            for _ in range(num_decoder_layers)
        ]
        bins = distance_bins(reg_max, reg_scale, up)
        self.decoder = DETRPoseDecoder(layers, d_model, bins, reg_scale, keeps_positions=keeps_positions)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in layers)
        self.quality_embed = nn.ModuleList(KeypointQuality(num_keypoints) for _ in layers)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict keypoints and class logits per query, from the neck's maps (B, channels, h, w); see `QueryHead`.

        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        maps = {name: project(features[name]) for name, project in zip(features, self.input_proj)}
        levels = flatten_levels(maps, None, padding_mask)
        selection, points = self.proposals(levels, self.num_queries)
        content = torch.cat(
            (
                self.instance_embed.weight.expand(self.num_queries, 1, -1),
                self.keypoint_embed.weight + self.query_embed.weight[:, None],
            ),
            dim=1,
        )
        queries = Queries(content.expand(points.shape[0], -1, -1, -1), references=with_centers(points))
        if added is not None:
            queries = added.join(queries, self)
        decoded = self.decoder(queries, levels)

        first = decoded[0]
        initial = self._predictions(self.class_embed[0](first.instances), first.initial_points, first.references)
        # Together for all layers, as the gradient of each sampling is as large as the map.
        points = torch.stack([layer.points for layer in decoded], dim=1)  # (B, layers, L, K, 2)
        statistics = self._statistics(points, _without_padding(levels, maps), levels)
        layers = []
        for i, (class_embed, quality_embed, layer) in enumerate(zip(self.class_embed, self.quality_embed, decoded)):
            logits = class_embed(layer.instances) + quality_embed(statistics[:, i].to(layer.instances.dtype))
            layers.append(self._predictions(logits, layer.points, layer.references))
        return {
            **layers[-1],
            # First the keypoints without distributions after the first layer, then the same of each layer but the last.
            "aux_outputs": [initial, *layers[:-1]],
            "training_outputs": [selection],  # the predictions at the selected locations, (B, Q, ...)
        }

    @staticmethod
    def _statistics(points: Tensor, features: Tensor, levels: Levels) -> Tensor:
        """Return the statistics of the finest map at keypoints (B, layers, L, K, 2), see `largest_channels`."""
        in_maps = in_padded_maps(points.flatten(1, 3), levels.valid_ratios)[:, :, 0]
        return largest_channels(in_maps, features).unflatten(1, points.shape[1:4]).flatten(3)

    @staticmethod
    def _predictions(logits: Tensor, points: Tensor, references: Tensor) -> dict[str, Tensor]:
        return {
            "pred_logits": logits,  # (B, Q, num_classes), one sigmoid per class
            "pred_keypoints": points,  # (B, Q, K, 2) x, y in 0..1 of the unpadded image
            "pred_boxes": boxes_around_points(points.detach()),  # (B, Q, 4) cxcywh, around all keypoints
            "reference_points": references[:, :, 0],  # (B, Q, 2), the centers that the layer sampled around
        }


class KeypointSelection(nn.Module):
    """Queries start from the keypoints of the locations with the best class scores, which are predicted around them.

    Unlike `LocationSelection`, which has D-FINE's queries, it uses no contents of locations.
    """

    def __init__(self, d_model: int, num_classes: int, num_keypoints: int):
        super().__init__()
        self.enc_output = Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        self.class_embed = class_head(d_model, num_classes)
        self.keypoint_embed = MLP((d_model, 2 * d_model, 2 * d_model, 2 * d_model, 2 * num_keypoints))
        nn.init.zeros_(self.keypoint_embed.layers[-1].weight)
        nn.init.zeros_(self.keypoint_embed.layers[-1].bias)

    def forward(self, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Tensor]:
        """Select the locations with the highest probability of any class; padding only if there are too few others.

        Returns:
            the predictions at the selected locations, as one of `training_outputs`.
            points: (B, num_queries, K, 2) in 0..1, without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations("DETRPose", levels, num_queries)
        centers = levels.centers().expand(levels.tokens.shape[0], -1, -1)
        unusable = ((centers <= 0.01) | (centers >= 0.99)).any(-1, keepdim=True)
        if levels.padding_mask is not None:
            unusable = unusable | levels.padding_mask[..., None]
        memory = levels.tokens.masked_fill(unusable, 0)
        content, logits, best = select_locations(self, memory, levels.padding_mask, num_queries)
        # Unlike boxes in D-FINE, keypoints of unusable locations are around them.
        anchors = torch.logit(gather_rows(centers, best), eps=1e-6)
        points = (self.keypoint_embed(content).float().unflatten(-1, (-1, 2)) + anchors[:, :, None]).sigmoid()
        selection = {
            "name": "enc",
            "pred_logits": logits,  # (B, Q, num_classes)
            "pred_keypoints": points,  # (B, Q, K, 2)
        }
        return selection, points.detach()

    def contents(self, memory: Tensor) -> Tensor:
        """(B, N, d_model) -> the same."""
        return self.enc_output_norm(self.enc_output(memory))


class DecodedPoses(NamedTuple):
    """The output of a decoder layer for its L queries."""

    instances: Tensor
    """(B, L, d_model), the states of the instances."""
    references: Tensor
    """(B, L, 1 + K, 2), the points that it attended around, without gradient."""
    initial_points: Tensor
    """(B, L, K, 2), the keypoints that the first layer predicts, from which all shifts are measured."""
    shifts: Tensor
    """(B, L, K, 2 * (reg_max + 1)) logits of the bins of x and y."""
    points: Tensor
    """(B, L, K, 2)."""


class DETRPoseDecoder(nn.Module):
    """Decoder that refines the distributions of the keypoints' coordinates.

    Args:
        bins: (reg_max + 1,) shifts that bins stand for.
        reg_scale: number of a shift's units in the image's width or height.
        keeps_positions: see `DETRPoseHead`.
    """

    def __init__(
        self,
        layers: "list[DETRPoseDecoderLayer]",
        d_model: int,
        bins: Tensor,
        reg_scale: float,
        *,
        keeps_positions: bool,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.position_embed = MLP((d_model, d_model, d_model))
        init_deformable(self.layers, self.position_embed)
        self.keypoint_embed = box_head(d_model, num_outputs=2)
        self.shift_embed = nn.ModuleList(box_head(d_model, num_outputs=2 * len(bins)) for _ in layers)
        self.register_buffer("bins", bins, persistent=False)
        self.reg_scale = float(reg_scale)
        self.keeps_positions = keeps_positions

    def forward(self, queries: Queries, levels: Levels) -> list[DecodedPoses]:
        """Decode the queries with every layer, attending to the tokens of `levels`."""
        x, references = queries.content, queries.references
        decoded: list[DecodedPoses] = []
        for layer, shift_embed in zip(self.layers, self.shift_embed):
            # In this order, since published weights expect it.
            codes = sine_positions_boxes(references[:, :, 1:].flip(-1), x.shape[-1])
            positions = self.position_embed(codes.to(x.dtype))
            previous = x[:, :, 1:].detach()
            if self.keeps_positions:
                previous = previous + positions.detach()
            positions = F.pad(positions, (0, 0, 1, 0))  # none for instances
            around = levels.around(references.flatten(1, 2))
            x = layer(x, levels.tokens, positions=positions, bias=queries.bias, **around)
            states = x[:, :, 1:]
            if decoded:
                # The previous layer's states have no gradient from this layer's shifts, but its shifts do.
                shifts = shift_embed(states + previous) + decoded[-1].shifts
                initial_points = decoded[-1].initial_points
            else:
                shifts = shift_embed(states)
                start = inverse_sigmoid(references[:, :, 1:].float(), eps=1e-3)
                initial_points = (self.keypoint_embed(states).float() + start).sigmoid()
            means = (shifts.float().unflatten(-1, (2, -1)).softmax(-1) * self.bins.float()).sum(-1)
            points = initial_points.detach() + means / self.reg_scale
            decoded.append(DecodedPoses(x[:, :, 0], references, initial_points, shifts, points))
            references = with_centers(points.detach())
        return decoded


class DETRPoseDecoderLayer(nn.Module):
    """Self-attention within each instance, then between the instances' tokens of one kind, deformable cross-attention
    joined by a gate, and a feed-forward network, post-norm.

    The cross-attention reads the memory as it is, without projections.

    Args:
        d_model, num_levels: channels, and number of maps. The other arguments are those of `DETRPoseHead`.
    """

    activation_checkpointing = False

    def __init__(
        self,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int,
        num_points: int | Sequence[int],
        d_ffn: int,
        dropout: float,
        keeps_positions: bool,
    ):
        super().__init__()
        self.within_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.across_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm2 = nn.LayerNorm(d_model)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_heads, num_levels=num_levels, num_points=num_points, projections=False
        )
        self.gateway = Gate(d_model)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.keeps_positions = keeps_positions

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
    ) -> Tensor:
        """Apply both self-attentions, cross-attention to the memory, and the feed-forward network.

        Args:
            x: (B, L, T, d_model), T tokens of each query.
            memory: (B, S, d_model).
            positions: (B, L, T, d_model).
            reference_points: (B, L * T, levels, 2), see `in_padded_maps`.
            padding_mask: (B, S) bool, padding of the memory, True = padding.
            bias: bias of the self-attention between instances, float, broadcastable to (B * T, heads, L, L).
        """
        batch_size, num_queries = x.shape[:2]
        coded = (x + positions).flatten(0, 1)
        tokens = coded if self.keeps_positions else x.flatten(0, 1)
        tokens = self.norm1(tokens + self.dropout(self.within_attn(coded, coded, tokens)))

        of_kind = tokens.unflatten(0, (batch_size, num_queries)).transpose(1, 2).flatten(0, 1)  # (B * T, L, d_model)
        of_kind = self.norm2(of_kind + self.dropout(self.across_attn(of_kind, of_kind, of_kind, bias=bias)))

        x = of_kind.unflatten(0, (batch_size, -1)).transpose(1, 2)
        coded = x + positions
        x = coded if self.keeps_positions else x
        attended = self.cross_attn(
            coded.flatten(1, 2), memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.gateway(x, self.dropout(attended.view_as(x)))
        # An infinite sum in float16 would be nan after the norm.
        return self.norm3((x + self.dropout(self.ffn(x))).clamp(-MAX_FLOAT16, MAX_FLOAT16))


class KeypointQuality(nn.Module):
    """Adjusts an instance's class logits by the largest channels of the finest map at its keypoints, DETRPose's form of
    D-FINE's `LocationQuality`; see `largest_channels`.

    Args:
        d_hidden: channels of the hidden layer.
    """

    def __init__(self, num_keypoints: int, *, d_hidden: int = 256):
        super().__init__()
        self.reg_conf = MLP((num_keypoints * (NUM_LARGEST + 1), d_hidden, 1))
        nn.init.zeros_(self.reg_conf.layers[-1].weight)
        nn.init.zeros_(self.reg_conf.layers[-1].bias)

    def forward(self, statistics: Tensor) -> Tensor:
        """(B, L, K * 5) -> (B, L, 1), to be added to class logits."""
        return self.reg_conf(statistics)


def largest_channels(points: Tensor, features: Tensor) -> Tensor:
    """Return the largest channels at points, largest first, and their mean: (B, P, 5).

    Args:
        points: (B, P, 2) x, y in 0..1 of the map.
        features: (B, channels, h, w), whose padding is zero, like everything outside.
    """
    sampled = F.grid_sample(features, 2 * points[:, None].to(features.dtype) - 1, align_corners=False)[:, :, 0]
    largest = sampled.topk(NUM_LARGEST, dim=1).values
    return torch.cat([largest, largest.mean(1, keepdim=True)], dim=1).transpose(1, 2)


def with_centers(points: Tensor) -> Tensor:
    """Put the mean of each instance's keypoints before them: (B, L, K, 2) -> (B, L, 1 + K, 2)."""
    return torch.cat((points.mean(2, keepdim=True), points), dim=2)


def _without_padding(levels: Levels, maps: Mapping[str, Tensor]) -> Tensor:
    """Return the finest map, (B, d_model, h, w) in float32 or higher precision, with zeros in the padding."""
    finest = next(iter(maps.values()))
    if levels.padding_mask is not None:
        height, width = levels.shapes[0]
        padding = levels.padding_mask[:, : height * width].unflatten(1, (height, width))
        finest = finest.masked_fill(padding[:, None], 0)
    return finest.to(torch.promote_types(finest.dtype, torch.float32))
