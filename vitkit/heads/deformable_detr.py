"""Deformable DETR's head: a transformer that attends to a few locations of several maps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.nn.deformable_transformer import (
    DeformableDecoder,
    DeformableEncoder,
    DeformableSettings,
    Levels,
    box_head,
    flatten_levels,
    init_deformable,
)
from vitkit.nn.position import sine_positions_boxes
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo

PRIOR_PROBABILITY = 0.01
"""Probability of a class at the start of training: so low that the many empty queries do not swamp the focal loss."""


@dataclass(frozen=True)
class DeformableDETRSettings(DeformableSettings):
    """An encoder and a decoder with deformable attention."""

    d_model: int = 256
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    refine_boxes: bool = False
    """Iterative bounding box refinement."""
    two_stage: bool = False
    """Queries start from the encoder's best boxes instead of learned ones; needs `refine_boxes`."""


@HEADS.register
class DeformableDETRHead(nn.Module):
    """Zhu et al. 2021, https://arxiv.org/abs/2010.04159. Reads all maps of the neck.

    Args:
        feature_info: of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_classes: the logits per query; there is none for "no object".
        num_queries: boxes predicted per image.
    Raises:
        ConfigError: a map has other than `d_model` channels, or the options exclude each other.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: DeformableDETRSettings = DeformableDETRSettings(),
    ):
        super().__init__()
        d_model, refine_boxes, two_stage = settings.d_model, settings.refine_boxes, settings.two_stage
        for name, info in feature_info.items():
            if info.channels != d_model:
                raise ConfigError(
                    f"DeformableDETRHead: d_model={d_model}, but feature {name!r} has {info.channels} channels: "
                    "set both to the same number (model.neck.out_channels, model.head.d_model)."
                )
        if num_queries < 1:
            raise ConfigError(f"DeformableDETRHead: num_queries={num_queries}, expected at least 1.")
        if two_stage and not refine_boxes:
            raise ConfigError("DeformableDETRHead: two_stage needs refine_boxes=True (model.head.refine_boxes).")
        self.two_stage = two_stage
        num_levels = len(feature_info)
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(settings.num_encoder_layers, d_model, num_levels, settings)
        self.decoder = DeformableDecoder(
            settings.num_decoder_layers, d_model, num_levels, settings, refine_boxes=refine_boxes
        )
        self.class_embed = nn.ModuleList(
            class_head(d_model, num_classes) for _ in range(settings.num_decoder_layers if refine_boxes else 1)
        )
        if two_stage:
            self.proposals = EncoderProposals(d_model, num_classes, num_queries=num_queries)
        else:
            self.query_embed = nn.Embedding(num_queries, 2 * d_model)
            self.reference_points = nn.Linear(d_model, 2)
            # A box begins around its point a tenth of the image wide.
            nn.init.constant_(self.decoder.bbox_embed[0].layers[-1].bias[2:], -2.0)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)
        if not two_stage:
            nn.init.xavier_uniform_(self.reference_points.weight)
            nn.init.zeros_(self.reference_points.bias)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Returns:
            pred_logits: (B, Q, num_classes), one sigmoid per class.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            reference_points: (B, Q, 2 or 4), what the layer sampled around: points (x, y) or boxes cxcywh in 0..1.
            aux_outputs: the same three of each decoder layer but the last, first layer first.
            enc_outputs: with two stages, pred_logits and pred_boxes of every location (B, S, ...).
        Raises:
            DataError: with two stages, the maps have fewer locations than there are queries.
        """
        levels = flatten_levels(features, self.level_embed, padding_mask, position_offset=-0.5)
        memory = self.encoder(levels)

        extra = {}
        if self.two_stage:
            proposals = self.proposals(memory, levels)
            positions, queries, references = proposals.positions, proposals.queries, proposals.boxes_cxcywh
            extra["enc_outputs"] = dict(pred_logits=proposals.all_logits, pred_boxes=proposals.all_boxes_cxcywh)
        else:
            positions, queries = self.query_embed.weight.expand(len(memory), -1, -1).chunk(2, dim=-1)
            references = self.reference_points(positions).float().sigmoid()

        decoded = self.decoder(queries, memory, levels, positions=positions, references=references)
        shared = len(self.class_embed) == 1
        outputs = [
            dict(
                pred_logits=self.class_embed[0 if shared else i](layer.states),
                pred_boxes=layer.boxes_cxcywh,
                reference_points=layer.references,
            )
            for i, layer in enumerate(decoded)
        ]
        return dict(**outputs[-1], aux_outputs=outputs[:-1], **extra)


class Proposals(NamedTuple):
    """The first stage's result: Q queries to decode, and what each of the S locations predicts."""

    positions: Tensor
    """(B, Q, d_model)."""
    queries: Tensor
    """(B, Q, d_model)."""
    boxes_cxcywh: Tensor
    """(B, Q, 4) in 0..1, without gradient."""
    all_logits: Tensor
    """(B, S, num_classes); the first class stands for objects of any class."""
    all_boxes_cxcywh: Tensor
    """(B, S, 4) in 0..1."""


class EncoderProposals(nn.Module):
    """The first of two stages (Zhu et al. 2021, appendix A.4): each location proposes a box, the best are decoded."""

    def __init__(self, d_model: int, num_classes: int, *, num_queries: int):
        super().__init__()
        self.num_queries = num_queries
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        self.pos_trans = nn.Linear(2 * d_model, 2 * d_model)
        self.pos_trans_norm = nn.LayerNorm(2 * d_model)
        for layer in (self.enc_output, self.pos_trans):
            nn.init.xavier_uniform_(layer.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)

    def forward(self, memory: Tensor, levels: Levels) -> Proposals:
        """Propose a box at each location.

        Args:
            memory: (B, S, d_model), the encoded levels.
        Raises:
            DataError: there are fewer locations than queries.
        """
        if memory.shape[1] < self.num_queries:
            raise DataError(
                f"two-stage Deformable DETR: the maps {levels.shapes} have {memory.shape[1]} locations, fewer than the "
                f"{self.num_queries} queries that are chosen from them. Use larger images, or fewer queries "
                "(model.num_queries)."
            )
        anchors, unusable = anchor_boxes(levels)
        x = self.enc_output_norm(self.enc_output(memory.masked_fill(unusable, 0)))
        logits = self.class_embed(x)
        # An unusable location stays at infinity: its box is the constant 1, without gradient.
        box_logits = self.bbox_embed(x).float() + torch.logit(anchors).masked_fill(unusable, torch.inf)

        best = logits[..., 0].topk(self.num_queries, dim=1).indices
        references = box_logits.detach().gather(1, best[..., None].expand(-1, -1, 4)).sigmoid()
        code = sine_positions_boxes(references, memory.shape[-1]).to(memory.dtype)
        positions, queries = self.pos_trans_norm(self.pos_trans(code)).chunk(2, dim=-1)
        return Proposals(positions, queries, references, logits, box_logits.sigmoid())


def anchor_boxes(levels: Levels) -> tuple[Tensor, Tensor]:
    """Return the box that each location starts from: around its centre, 0.05 of the image wide, doubled per level.

    Returns:
        boxes_cxcywh: (B, S, 4) in 0..1 of the un-padded image.
        unusable: (B, S, 1) bool: padded, or nearer than 0.01 to an end of the range.
    """
    centres = levels.centers()
    widths = torch.cat([centres.new_full((n, 2), 0.05 * 2**level) for level, n in enumerate(levels.sizes)])
    boxes = torch.cat([centres, widths.expand_as(centres)], dim=-1)
    unusable = ((boxes <= 0.01) | (boxes >= 0.99)).any(-1, keepdim=True)
    if levels.padding_mask is not None:
        unusable = unusable | levels.padding_mask[..., None]
    return boxes, unusable


def class_head(d_model: int, num_classes: int) -> nn.Linear:
    """Return a linear layer to class logits, biased to `PRIOR_PROBABILITY`."""
    head = nn.Linear(d_model, num_classes)
    nn.init.constant_(head.bias, -math.log((1 - PRIOR_PROBABILITY) / PRIOR_PROBABILITY))
    return head
