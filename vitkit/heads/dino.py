"""DINO (Zhang et al. 2022, https://arxiv.org/abs/2203.03605): mixed query selection, contrastive denoising,
look forward twice."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.deformable_transformer import DeformableDecoderLayer, DeformableEncoder, flatten_levels, init_deformable
from vitkit.nn.detection import check_channels, class_head
from vitkit.nn.queries import Queries, QueryHead, TrainingQueries
from vitkit.nn.query_selection import BoxSelection
from vitkit.nn.refining_decoder import LOGIT_EPS, RefiningDecoder
from vitkit.registry import HEADS, Spec
from vitkit.structures import FeatureInfo


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
        box_eps: distance to 0 and 1 to which coordinates are clamped before a box is predicted around them; 1e-5 in
            mmdetection.
        position_offset, temperature: of the sines of the maps' locations, see `flatten_levels`; -0.5 and 10,000 in
            detrex.
        rounds_padding: see `QueryHead`. False is not the paper's, and better for images of many sizes: what was learned
            in some holds in the others (configs/bccd/measurements.md).
        masks: spec of what predicts a mask for each query: "BlockMasks" or "PyramidMasks"; None: there are no masks.
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
        box_eps: float = LOGIT_EPS,
        position_offset: float = 0.0,
        temperature: float = 20.0,
        rounds_padding: bool = True,
        masks: Spec | None = None,
    ):
        super().__init__()
        check_channels("DINOHead", feature_info, d_model)
        if num_queries < 1:
            raise ConfigError(f"DINOHead: num_queries={num_queries}, expected at least 1.")
        self.d_model, self.num_queries, self.learned_channels = d_model, num_queries, d_model
        self.rounds_padding = rounds_padding
        strides = None if rounds_padding else [info.stride for info in feature_info.values()]
        self.locations = dict(position_offset=position_offset, temperature=temperature, strides=strides)
        num_levels = len(feature_info)
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        num_predictors = 1 if share_heads else num_decoder_layers
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(num_encoder_layers, d_model, num_levels, **layer)
        layers = [DeformableDecoderLayer(d_model, num_levels, **layer) for _ in range(num_decoder_layers)]
        self.decoder = RefiningDecoder(
            layers, d_model, num_predictors, look_forward_twice=look_forward_twice, prediction_eps=box_eps
        )
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in range(num_predictors))
        self.proposals = BoxSelection("DINO", d_model, partial(class_head, d_model, num_classes), num_queries)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)
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
            DataError: the maps have fewer locations than there are queries.
        """
        levels = flatten_levels(features, self.level_embed, padding_mask, **self.locations)
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
                # (B, Q, num_classes), one sigmoid per class
                "pred_logits": self.class_embed[i % len(self.class_embed)](states),
                "pred_boxes": boxes,  # (B, Q, 4) cxcywh in 0..1 of the unpadded image
                "reference_points": references,  # (B, Q, 4), the boxes that the layer sampled in
            }
            for i, (states, references, boxes) in enumerate(decoded)
        ]
        outputs = {
            **layers[-1],
            "aux_outputs": layers[:-1],  # the same of each decoder layer but the last, first layer first
            "training_outputs": [selection],  # the encoder's predictions at the selected locations, (B, Q, ...)
        }
        maps = levels.split_maps(memory, features)
        return self.with_masks(outputs, maps, [states for states, _, _ in decoded], padding_mask)

    def make_queries(self, learned: Tensor, boxes: Tensor) -> Queries:
        """Return queries with learned content, (B, Q, d_model), at selected boxes; see `QueryHead`."""
        return Queries(learned, references=boxes)
