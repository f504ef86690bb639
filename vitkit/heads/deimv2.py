"""DEIMv2 (Huang et al. 2025, https://arxiv.org/abs/2509.20787): a lighter decoder that predicts the edges of
boxes as distributions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.dfine import (
    DFINEDecoder,
    DFINEDecoderLayer,
    Gate,
    GatedDecoderLayer,
    LocationQuality,
    map_projection,
    refined_outputs,
)
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import flatten_levels
from vitkit.nn.detection import check_at_least_1, class_head
from vitkit.nn.layers import SwiGLU, init_xavier
from vitkit.nn.queries import QueryHead, TrainingQueries
from vitkit.nn.query_selection import LocationSelection
from vitkit.ops.box_distances import distance_bins
from vitkit.registry import HEADS, Spec
from vitkit.structures import FeatureInfo

RMSNorm = partial(nn.RMSNorm, eps=1e-6)


@HEADS.register
class DEIMv2Head(QueryHead):
    """DEIMv2's decoder and its predictions.

    Its contrastive denoising is a set of training queries, see `BoxDenoising`.

    Args:
        feature_info: description of the neck's maps, fine to coarse.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        num_points: locations per head and level that a query samples; a list: of each level.
        d_model, num_heads, dropout: of all layers, see `vitkit.nn.transformer`.
        layer: "deimv2": `DEIMv2DecoderLayer`; "dfine": `DFINEDecoderLayer`, with this `activation` (ECDet).
        d_ffn: width of each feed-forward network; in DEIMv2's layer, of the gate and the values together, an even
            number.
        gate: whether a gate joins the cross-attention (`Gate`); False: a sum and a norm, only in DEIMv2's layer.
        shared_box_head: whether all layers share the head of their distributions.
        activation: of the heads, see `MLP`.
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
        layer: Literal["deimv2", "dfine"] = "deimv2",
        d_ffn: int = 512,
        dropout: float = 0.0,
        gate: bool = True,
        shared_box_head: bool = False,
        activation: str = "silu",
        num_decoder_layers: int = 4,
        reg_max: int = 32,
        reg_scale: float = 4.0,
        up: float = 0.5,
        masks: Spec | None = None,
    ):
        super().__init__()
        check_at_least_1("DEIMv2Head", num_queries=num_queries, num_decoder_layers=num_decoder_layers)
        make_layer = _layers_of(layer, d_ffn, gate=gate, activation=activation)
        self.d_model, self.num_queries, self.up = d_model, num_queries, up
        self.input_proj = nn.ModuleList(map_projection(info.channels, d_model) for info in feature_info.values())
        self.proposals = LocationSelection("DEIMv2", d_model, num_classes, activation=activation, projects=False)
        sizes = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        layers = [make_layer(d_model, len(feature_info), **sizes) for _ in range(num_decoder_layers)]
        bins = distance_bins(reg_max, reg_scale, up)
        decoder = dict(activation=activation, num_box_heads=1 if shared_box_head else None, keeps_positions=True)
        self.decoder = DFINEDecoder(layers, d_model, bins, reg_scale, **decoder)
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

        Returns:
            see `refined_outputs`.
        Raises:
            DataError: the maps have fewer locations than there are queries.
        """
        maps = {name: project(features[name]) for name, project in zip(features, self.input_proj)}
        levels = flatten_levels(maps, None, padding_mask)
        selection, queries = self.proposals(levels.tokens, levels, self.num_queries)
        if added is not None:
            queries = added.join(queries, self)
        decoded = self.decoder(queries, levels)
        outputs = refined_outputs(decoded, self.class_embed, self.quality_embed, self.decoder, selection)
        return self.with_masks(outputs, features, [layer.states for layer in decoded], padding_mask)


def _layers_of(layer: str, d_ffn: int, *, gate: bool, activation: str) -> Callable[..., nn.Module]:
    """Return what makes the decoder's layers, see `DEIMv2Head`; raise a ConfigError if the layer is unknown, it has no
    such gate, or its width is no even number."""
    if layer not in ("deimv2", "dfine"):
        raise ConfigError(f"DEIMv2Head: layer={layer!r}: expected 'deimv2' or 'dfine'.")
    if layer == "dfine":
        if not gate:
            raise ConfigError("DEIMv2Head: gate=False: layer='dfine' always has a gate. Choose layer='deimv2'.")
        return partial(DFINEDecoderLayer, activation=activation)
    if d_ffn < 2 or d_ffn % 2:
        raise ConfigError(f"DEIMv2Head: d_ffn={d_ffn}: expected an even number, half of it for the gate.")
    return partial(DEIMv2DecoderLayer, gate=gate)


class DEIMv2DecoderLayer(GatedDecoderLayer):
    """Self-attention, deformable cross-attention and a gated feed-forward network, post-norm with RMS norms.

    Args:
        d_model, num_levels: channels, and number of maps. The other arguments are those of `DEIMv2Head`.
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
        gate: bool,
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.norm1 = RMSNorm(d_model)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_heads, num_levels=num_levels, num_points=num_points, projections=False
        )
        if gate:
            self.gateway = Gate(d_model, RMSNorm)
        else:
            self.norm2 = RMSNorm(d_model)
        self.has_gate = gate
        self.ffn = SwiGLU(d_model, d_ffn // 2)
        init_xavier(self.ffn)
        nn.init.zeros_(self.ffn.fc1.bias)
        nn.init.zeros_(self.ffn.fc2.bias)
        self.norm3 = RMSNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """See `GatedDecoderLayer`; without a gate, the sum is normalized."""
        return super().join(x, attended) if self.has_gate else self.norm2(x + attended)
