"""D-FINE (Peng et al. 2024, https://arxiv.org/abs/2410.13842): each edge of a box is a distribution, refined by the
decoder's layers (fine-grained distribution refinement, FDR)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import Levels, flatten_levels
from vitkit.nn.detection import box_head, boxes_around, check_at_least_1, class_head
from vitkit.nn.layers import MLP, FeedForward, Linear, init_xavier
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import LocationSelection
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.ops.box_distances import boxes_at_distances, distance_bins
from vitkit.registry import HEADS, Spec
from vitkit.structures import FINER, FeatureInfo

MAX_FLOAT16 = 65504
"""The largest number in float16."""


@HEADS.register
class DFINEHead(QueryHead):
    """D-FINE's decoder and its predictions.

    Its contrastive denoising is a set of training queries, see `BoxDenoising`.

    Args:
        feature_info: description of the neck's maps, fine to coarse.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        num_points: locations per head and level that a query samples; a list: of each level.
        d_model, num_heads, d_ffn, dropout: of all layers, see `vitkit.nn.transformer`.
        activation: "relu", or "silu" as in DEIM's weights, in all networks of more than one layer.
        reg_max: number of bins of each edge's distribution minus one; even.
        reg_scale, up: of the distances that bins stand for, see `distance_bins`.
        masks: spec of what predicts a mask for each query: "BlockMasks" or "PyramidMasks"; None: there are no masks.
    Raises:
        ConfigError: there are no queries or layers, or an argument is out of range.
    """

    query_outputs = ("pred_logits", "pred_boxes", "pred_corners", "initial_boxes", "reference_points")
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
        num_points: int | Sequence[int] = 4,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        activation: str = "relu",
        num_decoder_layers: int = 6,
        reg_max: int = 32,
        reg_scale: float = 4.0,
        up: float = 0.5,
        masks: Spec | None = None,
    ):
        super().__init__()
        check_at_least_1("DFINEHead", num_queries=num_queries, num_decoder_layers=num_decoder_layers)
        self.d_model, self.num_queries, self.up = d_model, num_queries, up
        attended = {name: info for name, info in feature_info.items() if name != FINER}
        self.input_proj = nn.ModuleList(map_projection(info.channels, d_model) for info in attended.values())
        self.proposals = LocationSelection("D-FINE", d_model, num_classes, activation=activation)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout, activation=activation)
        layers = [DFINEDecoderLayer(d_model, len(attended), **layer) for _ in range(num_decoder_layers)]
        bins = distance_bins(reg_max, reg_scale, up)
        self.decoder = DFINEDecoder(layers, d_model, bins, reg_scale, activation=activation)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in layers)
        self.quality_embed = nn.ModuleList(LocationQuality(reg_max, activation=activation) for _ in layers)
        self.add_masks(masks, feature_info, num_decoder_layers)

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        added: TrainingQueries | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query, from the neck's maps (B, channels, h, w); see `QueryHead`.

        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        attended = [name for name in features if name != FINER]
        maps = {name: project(features[name]) for name, project in zip(attended, self.input_proj)}
        levels = flatten_levels(maps, None, padding_mask)
        selection, queries = self.proposals(levels.tokens, levels, self.num_queries)
        if added is not None:
            queries = added.join(queries, self)
        decoded = self.decoder(queries, levels)
        outputs = refined_outputs(decoded, self.class_embed, self.quality_embed, self.decoder, selection)
        return self.with_masks(outputs, features, [layer.states for layer in decoded], padding_mask)


def refined_outputs(
    decoded: "Sequence[DecodedLayer]",
    class_heads: Sequence[nn.Module],
    quality_heads: Sequence[nn.Module],
    decoder: nn.Module,
    selection: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a head's outputs.

    Args:
        decoded: of each layer of `decoder`, which has `bins` and `reg_scale`, see `DFINEDecoder`.
        class_heads, quality_heads: make a layer's class logits of its states, and what its distributions add to them.
        selection: the encoder's predictions at the selected locations.
    """
    first = decoded[0]
    logits = class_heads[0](first.states)
    initial = dict(pred_logits=logits, pred_boxes=first.initial_boxes, reference_points=first.references)
    layers = [
        {
            # (B, Q, num_classes), one sigmoid per class
            "pred_logits": class_head(layer.states) + quality_head(layer.corners),
            "pred_boxes": layer.boxes,  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "pred_corners": layer.corners,  # (B, Q, 4 * (reg_max + 1)) logits of each edge's bins
            # (B, Q, 4) cxcywh, from whose edges distances are measured
            "initial_boxes": layer.initial_boxes.detach(),
            "reference_points": layer.references,  # (B, Q, 4), the boxes that the layer sampled in
        }
        for class_head, quality_head, layer in zip(class_heads, quality_heads, decoded)
    ]
    return {
        **layers[-1],
        # First the first layer's own boxes, which have no distributions, then the same of each layer but the last.
        "aux_outputs": [initial, *layers[:-1]],
        "training_outputs": [selection],  # the encoder's predictions at the selected locations, (B, Q, ...)
        "distance_bins": decoder.bins,  # (reg_max + 1,), the distance that each bin stands for
        "reg_scale": decoder.reg_scale,
    }


def map_projection(in_channels: int, d_model: int) -> nn.Module:
    """Return a projection of a map; it stays as it is if it has that number of channels."""
    if in_channels == d_model:
        return nn.Identity()
    projection = ConvNorm(in_channels, d_model, 1, silu=False)
    nn.init.xavier_uniform_(projection[0].weight)
    return projection


class DecodedLayer(NamedTuple):
    """The output of a decoder layer for its L queries."""

    states: Tensor
    """(B, L, d_model)."""
    references: Tensor
    """(B, L, 4) cxcywh, the boxes that it attended in, without gradient."""
    initial_boxes: Tensor
    """(B, L, 4) cxcywh, the boxes that the first layer predicts, from whose edges all distances are measured."""
    corners: Tensor
    """(B, L, 4 * (reg_max + 1)) logits of the bins of left, top, right and bottom."""
    boxes: Tensor
    """(B, L, 4) cxcywh, whose edges are at the mean distances of their distributions."""


class DFINEDecoder(nn.Module):
    """Decoder that refines the distributions of the boxes' edges (FDR, section 4.1).

    Args:
        bins: (reg_max + 1,) distances that bins stand for.
        reg_scale: number of a distance's units in the width or height of a box, see `boxes_at_distances`.
        num_box_heads: number of heads of distributions; 1: all layers share it; None: each has its own.
        keeps_positions: whether the queries' positions are those of the first boxes in all layers, as in DEIMv2.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        d_model: int,
        bins: Tensor,
        reg_scale: float,
        *,
        activation: str,
        num_box_heads: int | None = None,
        keeps_positions: bool = False,
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.bbox_embed = box_head(d_model, activation=activation)
        num_heads = num_box_heads or len(layers)
        self.corner_embed = nn.ModuleList(
            box_head(d_model, num_outputs=4 * len(bins), activation=activation) for _ in range(num_heads)
        )
        hidden = (d_model, d_model) if keeps_positions else (2 * d_model,)
        self.query_pos_head = MLP((4, *hidden, d_model), activation)
        init_xavier(self.query_pos_head)
        self.register_buffer("bins", bins, persistent=False)
        self.reg_scale, self.keeps_positions = float(reg_scale), keeps_positions

    def forward(self, queries: Queries, levels: Levels) -> list[DecodedLayer]:
        """Decode the queries with every layer, attending to the tokens of `levels`."""
        x, references = queries.content, queries.references
        decoded: list[DecodedLayer] = []
        for i, layer in enumerate(self.layers):
            previous = x
            if not (decoded and self.keeps_positions):
                positions = self.query_pos_head(references.to(x.dtype)).clamp(-10, 10)
            x = layer(x, levels.tokens, positions=positions, bias=queries.bias, **levels.around(references))
            corner_embed = self.corner_embed[i % len(self.corner_embed)]
            # The previous layer's states have no gradient from this layer's corners, but its corners do.
            corners = corner_embed(x + previous.detach()) + decoded[-1].corners if decoded else corner_embed(x)
            initial = decoded[-1].initial_boxes if decoded else boxes_around(references, self.bbox_embed(x))
            distances = (corners.float().unflatten(-1, (4, -1)).softmax(-1) * self.bins.float()).sum(-1)
            boxes = boxes_at_distances(initial.detach(), distances, self.reg_scale)
            decoded.append(DecodedLayer(x, references, initial, corners, boxes))
            references = boxes.detach()
        return decoded


class GatedDecoderLayer(nn.Module):
    """Base of decoder layers that attend to their queries and to the memory, which is read without projections."""

    activation_checkpointing = False

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the normalized sum of the queries and of what their cross-attention has read."""
        return self.gateway(x, attended)

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
        """Apply self-attention, cross-attention and the feed-forward network; see `DeformableDecoderLayer`."""
        qk = x + positions
        x = self.norm1(x + self.dropout(self.self_attn(qk, qk, x, bias=bias)))
        attended = self.cross_attn(
            x + positions, memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.join(x, self.dropout(attended))
        # An infinite sum in float16 would be nan after the norm.
        return self.norm3((x + self.dropout(self.ffn(x))).clamp(-MAX_FLOAT16, MAX_FLOAT16))


class DFINEDecoderLayer(GatedDecoderLayer):
    """Self-attention, deformable cross-attention joined by a gate, and a feed-forward network, post-norm.

    Args:
        d_model, num_levels: channels, and number of maps. The other arguments are those of `DFINEHead`.
    """

    def __init__(
        self,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int,
        num_points: int | Sequence[int],
        d_ffn: int,
        dropout: float,
        activation: str,
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_heads, num_levels=num_levels, num_points=num_points, projections=False
        )
        # In place of other decoder layers' residual sum and norm2, so checkpoints have other parameters than theirs.
        self.gateway = Gate(d_model)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout, activation=activation)
        init_xavier(self.ffn)
        self.norm3 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)


class Gate(nn.Module):
    """Normalized sum of two inputs, weighted per channel by sigmoids of both (section 4.3); initially their mean.

    Args:
        norm: makes the norm of `d_model` channels.
    """

    def __init__(self, d_model: int, norm: Callable[[int], nn.Module] = nn.LayerNorm):
        super().__init__()
        self.gate = Linear(2 * d_model, 2 * d_model)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.norm = norm(d_model)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """(..., d_model) each -> (..., d_model)."""
        gate_a, gate_b = self.gate(torch.cat([a, b], dim=-1)).sigmoid().chunk(2, dim=-1)
        return self.norm(gate_a * a + gate_b * b)


class LocationQuality(nn.Module):
    """The location quality estimator, LQE: adjusts a query's class logits by how certain its edges are, by each edge's
    largest probabilities (Generalized Focal Loss V2, Li et al. 2021, https://arxiv.org/abs/2011.12885).

    Args:
        reg_max: number of bins of each edge minus one.
        num_largest, d_hidden: number of probabilities, and channels of the hidden layer.
    """

    def __init__(self, reg_max: int, *, activation: str, num_largest: int = 4, d_hidden: int = 64):
        super().__init__()
        self.num_bins, self.num_largest = reg_max + 1, num_largest
        self.reg_conf = MLP((4 * (num_largest + 1), d_hidden, 1), activation)
        nn.init.zeros_(self.reg_conf.layers[-1].weight)
        nn.init.zeros_(self.reg_conf.layers[-1].bias)

    def forward(self, corners: Tensor) -> Tensor:
        """(..., 4 * (reg_max + 1)) logits -> (..., 1), to be added to class logits."""
        largest = corners.unflatten(-1, (4, self.num_bins)).softmax(-1).topk(self.num_largest, dim=-1).values
        statistics = torch.cat([largest, largest.mean(-1, keepdim=True)], dim=-1)
        return self.reg_conf(statistics.flatten(-2))
