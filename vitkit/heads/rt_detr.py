"""RT-DETR (Zhao et al. 2023, https://arxiv.org/abs/2304.08069): queries start from the encoder's best locations."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import DeformableDecoderLayer, Levels, flatten_levels, init_deformable
from vitkit.nn.detection import box_head, boxes_around, class_head
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import LocationSelection
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.registry import HEADS, Spec
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
        masks: spec of what predicts a mask for each query: "BlockMasks" or "PyramidMasks"; None: there are no masks.
    Raises:
        ConfigError: there are no queries.
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
        d_ffn: int = 1024,
        dropout: float = 0.0,
        num_decoder_layers: int = 6,
        masks: Spec | None = None,
    ):
        super().__init__()
        if num_queries < 1:
            raise ConfigError(f"RTDETRHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries = d_model, num_queries
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        self.input_proj = nn.ModuleList(
            ConvNorm(info.channels, d_model, 1, silu=False) for info in feature_info.values()
        )
        self.proposals = LocationSelection("RT-DETR", d_model, num_classes)
        layers = [DeformableDecoderLayer(d_model, len(feature_info), **layer) for _ in range(num_decoder_layers)]
        self.decoder = RTDETRDecoder(layers, d_model)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in layers)
        init_deformable(self.decoder.layers)
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
        outputs = {
            "pred_logits": layers[-1]["pred_logits"],  # (B, Q, num_classes), one sigmoid per class
            "pred_boxes": layers[-1]["pred_boxes"],  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
            "reference_points": layers[-1]["reference_points"],  # (B, Q, 4), the boxes that the layer sampled in
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            "training_outputs": [selection],  # the encoder's predictions at the selected locations, (B, Q, ...)
        }
        return self.with_masks(outputs, features, [states for states, _, _ in decoded], padding_mask)


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
            positions = self.query_pos_head(references.to(x.dtype))
            x = layer(x, memory, positions=positions, bias=queries.bias, **levels.around(references))
            deltas = bbox_embed(x)
            decoded.append((x, references, boxes_around(predicted_from, deltas)))
            # With its gradient, the next layer's loss also trains this layer's box.
            predicted_from = boxes_around(references, deltas)
            references = predicted_from.detach()
        return decoded
