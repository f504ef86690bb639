"""Deformable DETR's head: a transformer that attends to a few locations of several maps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError, DataError
from vitkit.nn.deformable_transformer import (
    DecoderSettings,
    DeformableDecoder,
    DeformableEncoder,
    Levels,
    box_head,
    flatten_levels,
    init_deformable,
)
from vitkit.nn.denoising import BoxDenoising, DenoisingSettings
from vitkit.nn.position import sine_positions_boxes
from vitkit.nn.query_groups import GroupQueries, GroupSettings
from vitkit.nn.training_queries import DenoisingQueries
from vitkit.registry import HEADS
from vitkit.structures import DetectionTarget, FeatureInfo

PRIOR_PROBABILITY = 0.01
"""Initial class probability: so low that the many empty queries do not dominate the focal loss."""


@dataclass(frozen=True)
class DeformableDETRSettings(DecoderSettings):
    """Settings of an encoder and a decoder with deformable attention."""

    d_model: int = 256
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    two_stage: bool = False
    """Whether queries start from the encoder's best boxes instead of learned ones; needs `refine_boxes`."""
    mixed_selection: bool = False
    """For two stages: the queries' boxes are selected, but their content is learned (DINO, section 3.4); needs
    `box_positions`. Locations are ranked by their most probable class, and the loss is computed for the selected
    ones."""
    position_offset: float = -0.5
    position_temperature: float = 10000.0
    """Temperature of the encoder's sine positions; DINO uses 0 and 20."""


@HEADS.register
class DeformableDETRHead(nn.Module):
    """Deformable DETR's head (Zhu et al. 2021, https://arxiv.org/abs/2010.04159), which reads all maps of the neck.

    With the options that name it, this is DINO's (Zhang et al. 2022, https://arxiv.org/abs/2203.03605). With
    `box_positions` in one stage, queries are learned anchor boxes (DAB-DETR, Liu et al. 2022,
    https://arxiv.org/abs/2201.12329).

    Args:
        feature_info: description of the neck's maps, fine to coarse; each must have `d_model` channels.
        num_classes: number of logits per query; there is none for "no object".
        num_queries: number of boxes predicted per image.
        denoising: see `DenoisingSettings`; queries must start from boxes.
        query_groups: further queries in training (Group DETR, H-DETR). With two stages, the best locations are the
            usual queries, and the next best those of the further groups.
    Raises:
        ConfigError: a map does not have `d_model` channels, or the options exclude each other.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: DeformableDETRSettings = DeformableDETRSettings(),
        denoising: DenoisingSettings = DenoisingSettings(),
        query_groups: GroupSettings = GroupSettings(),
    ):
        super().__init__()
        d_model, two_stage = settings.d_model, settings.two_stage
        _check_settings(feature_info, num_queries, settings)
        self.settings = settings
        num_levels = len(feature_info)
        self.level_embed = nn.Parameter(torch.empty(num_levels, d_model))
        self.encoder = DeformableEncoder(settings.num_encoder_layers, d_model, num_levels, settings)
        self.decoder = DeformableDecoder(settings.num_decoder_layers, d_model, num_levels, settings)
        self.class_embed = nn.ModuleList(class_head(d_model, num_classes) for _ in self.decoder.bbox_embed)
        if two_stage:
            proposals = MixedProposals if settings.mixed_selection else EncoderProposals
            self.proposals = proposals(d_model, num_classes, num_queries=num_queries)
            channels = d_model if settings.mixed_selection else 0
        elif settings.box_positions:
            self.query_embed = nn.Embedding(num_queries, d_model)
            self.reference_boxes = nn.Embedding(num_queries, 4)
            channels = d_model + 4
        else:
            self.query_embed = nn.Embedding(num_queries, 2 * d_model)
            channels = 2 * d_model
            self.reference_points = nn.Linear(d_model, 2)
            # Initial boxes are a tenth of the image wide, around their point.
            nn.init.constant_(self.decoder.bbox_embed[0].layers[-1].bias[2:], -2.0)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder.layers, self.decoder.layers)
        if not (two_stage or settings.box_positions):
            nn.init.xavier_uniform_(self.reference_points.weight)
            nn.init.zeros_(self.reference_points.bias)
        self.group_queries = GroupQueries(query_groups, num_queries, channels)
        self.denoising = BoxDenoising(num_classes, d_model, denoising)
        if self.denoising.is_enabled and not (two_stage or settings.box_positions):
            raise ConfigError(
                "DeformableDETRHead: denoising_queries needs queries that start from boxes: set two_stage=True or "
                "box_positions=True (model.head), or denoising_queries=None."
            )

    @property
    def uses_targets(self) -> bool:
        """Whether training adds denoising queries, which are made from the targets."""
        return self.denoising.is_enabled

    def forward(
        self,
        features: Mapping[str, Tensor],
        padding_mask: Tensor | None = None,
        *,
        targets: Sequence[DetectionTarget] | None = None,
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            targets: only in training, if there is denoising: the targets that noised queries are made from.
        Returns:
            pred_logits: (B, Q, num_classes), one sigmoid per class.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            reference_points: (B, Q, 2 or 4), what the layer sampled around: points (x, y) or boxes cxcywh in 0..1.
            aux_outputs: the same three for each decoder layer but the last, first layer first.
            enc_outputs: with two stages, pred_logits and pred_boxes for every location (B, S, ...).
            selected_outputs: with mixed selection, instead of those, the same for the selected locations (B, Q, ...).
            denoising: with targets, the first four for the noised queries, see `QueryLayout`.
            groups, one_to_many: in training, the same for further groups of queries, see `QueryLayout`.
        Raises:
            DataError: with two stages, the maps have fewer locations than there are queries.
        """
        settings = self.settings
        levels = flatten_levels(
            features,
            self.level_embed,
            padding_mask,
            position_offset=settings.position_offset,
            temperature=settings.position_temperature,
        )
        memory = self.encoder(levels)
        queries, first_stage = self._queries(memory, levels)
        noised = None
        if self.denoising.is_enabled and targets is not None:
            noised = self.denoising(targets)
            queries = queries.after(self._noised(noised))
        layout = self.group_queries.layout(noised)
        decoded = self.decoder(
            queries.content,
            memory,
            levels,
            references=queries.references,
            positions=queries.positions,
            bias=layout.attention_bias(memory),
        )
        layers = [
            dict(
                pred_logits=self.class_embed[i % len(self.class_embed)](layer.states),
                pred_boxes=layer.boxes_cxcywh,
                reference_points=layer.references,
            )
            for i, layer in enumerate(decoded)
        ]
        return {**layout.outputs(layers), **first_stage}

    def _queries(self, memory: Tensor, levels: Levels) -> tuple["Queries", dict[str, Any]]:
        """Return further groups of queries and the usual ones, and the first stage's outputs that have a loss."""
        if self.settings.two_stage:
            return self.proposals(memory, levels, self.group_queries)
        learned = self.query_embed.weight
        if self.settings.box_positions:
            learned = self.group_queries.before(torch.cat((learned, self.reference_boxes.weight), dim=1))
            content, boxes = learned.expand(memory.shape[0], -1, -1).split((memory.shape[-1], 4), dim=-1)
            return Queries(content, boxes.sigmoid()), {}
        positions, content = self.group_queries.before(learned).expand(memory.shape[0], -1, -1).chunk(2, dim=-1)
        return Queries(content, self.reference_points(positions).float().sigmoid(), positions), {}

    def _noised(self, noised: DenoisingQueries) -> "Queries":
        if self.settings.box_positions:
            return Queries(noised.content, noised.boxes_cxcywh)
        return Queries(noised.content, noised.boxes_cxcywh, self.proposals.encode(noised.boxes_cxcywh)[0])


class Queries(NamedTuple):
    """The L queries that the decoder starts from."""

    content: Tensor
    """(B, L, d_model)."""
    references: Tensor
    """(B, L, 2) points (x, y) or (B, L, 4) boxes cxcywh, in 0..1."""
    positions: Tensor | None = None
    """(B, L, d_model); None if the decoder computes them from boxes."""

    def after(self, first: "Queries") -> "Queries":
        """Return the queries of both, those of `first` first."""
        return Queries(*(None if a is None else torch.cat((a, b), dim=1) for a, b in zip(first, self)))


class EncoderProposals(nn.Module):
    """The first of two stages (Zhu et al. 2021, appendix A.4): each location proposes a box; the best are decoded."""

    def __init__(self, d_model: int, num_classes: int, *, num_queries: int):
        super().__init__()
        self.num_queries = num_queries
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model)
        self.make_content(d_model)

    def make_content(self, d_model: int) -> None:
        """Create the layers for the queries' content, which like their positions is computed from their boxes."""
        self.pos_trans = nn.Linear(2 * d_model, 2 * d_model)
        self.pos_trans_norm = nn.LayerNorm(2 * d_model)
        nn.init.xavier_uniform_(self.pos_trans.weight)

    def forward(self, memory: Tensor, levels: Levels, groups: GroupQueries) -> tuple[Queries, dict[str, Any]]:
        """Propose a box at each location, and select the best ones; the next best go to the further groups.

        Args:
            memory: (B, S, d_model), the encoded maps.
        Returns:
            the queries, with boxes without gradient; and the outputs for the loss, see `DeformableDETRHead.forward`.
        Raises:
            DataError: there are fewer locations than queries.
        """
        num_rows = groups.layout().num_rows
        if memory.shape[1] < num_rows:
            keys = "model.num_queries" + (", model.groups, model.one_to_many_queries" if groups.num_further else "")
            raise DataError(
                f"two-stage Deformable DETR: the maps {levels.shapes} have {memory.shape[1]} locations, fewer than the "
                f"{num_rows} queries that are chosen from them. Use larger images, or fewer queries ({keys})."
            )
        anchors, unusable = (x.expand(memory.shape[0], -1, -1) for x in anchor_boxes(levels))
        # An unusable location stays at infinity: its box is the constant 1, without gradient.
        anchor_logits = torch.logit(anchors).masked_fill(unusable, torch.inf)
        return self.select(memory.masked_fill(unusable, 0), anchor_logits, groups)

    def select(self, memory: Tensor, anchor_logits: Tensor, groups: GroupQueries) -> tuple[Queries, dict[str, Any]]:
        """Select queries by the first class, any object, from the locations' memory and anchors, (B, S, 4)."""
        logits, box_logits = self.predict(memory, anchor_logits)
        best = self.best_locations(logits[..., 0], groups)
        references = gather_rows(box_logits.detach(), best).sigmoid()
        positions, content = self.encode(references)
        outputs = dict(pred_logits=logits, pred_boxes=box_logits.sigmoid())
        return Queries(content, references, positions), dict(enc_outputs=outputs)

    def best_locations(self, scores: Tensor, groups: GroupQueries) -> Tensor:
        """Return the decoder's rows in the order of the scores (B, S), the usual queries last: (B, rows)."""
        best = scores.topk(groups.layout().num_rows, dim=1).indices
        return best.roll(-self.num_queries, dims=1)

    def predict(self, memory: Tensor, anchor_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the class and box logits of locations."""
        x = self.project(memory)
        return self.class_embed(x), self.bbox_embed(x).float() + anchor_logits

    def project(self, memory: Tensor) -> Tensor:
        """Return the input of the prediction heads."""
        return self.enc_output_norm(self.enc_output(memory))

    def encode(self, boxes_cxcywh: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions and the content of queries that start from boxes."""
        code = sine_positions_boxes(boxes_cxcywh, self.enc_output.in_features).to(self.pos_trans.weight.dtype)
        return self.pos_trans_norm(self.pos_trans(code)).chunk(2, dim=-1)


class MixedProposals(EncoderProposals):
    """DINO's mixed query selection (Zhang et al. 2022, section 3.4): boxes are selected, the content is learned."""

    def make_content(self, d_model: int) -> None:
        """Create the learned content."""
        self.content = nn.Embedding(self.num_queries, d_model)
        nn.init.xavier_uniform_(self.content.weight)

    def select(self, memory: Tensor, anchor_logits: Tensor, groups: GroupQueries) -> tuple[Queries, dict[str, Any]]:
        """Select by the most probable class; only the selected locations contribute boxes and gradients."""
        with torch.no_grad():
            scores = self.class_embed(self.project(memory)).amax(-1)
        best = self.best_locations(scores, groups)
        logits, box_logits = self.predict(gather_rows(memory, best), gather_rows(anchor_logits, best))
        usual = slice(-self.num_queries, None)
        outputs = dict(pred_logits=logits[:, usual], pred_boxes=box_logits[:, usual].sigmoid())
        content = groups.before(self.content.weight).expand(memory.shape[0], -1, -1)
        return Queries(content, box_logits.detach().sigmoid()), dict(selected_outputs=outputs)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Select rows of x, (B, S, C), by an index (B, Q): (B, Q, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _check_settings(
    feature_info: Mapping[str, FeatureInfo], num_queries: int, settings: DeformableDETRSettings
) -> None:
    """Raise ConfigError if a map has the wrong channels, there are no queries, or the options exclude each other."""
    for name, info in feature_info.items():
        if info.channels != settings.d_model:
            raise ConfigError(
                f"DeformableDETRHead: d_model={settings.d_model}, but feature {name!r} has {info.channels} channels: "
                "set both to the same number (model.neck.out_channels, model.head.d_model)."
            )
    if num_queries < 1:
        raise ConfigError(f"DeformableDETRHead: num_queries={num_queries}, expected at least 1.")
    if not 0 < settings.logit_eps < 0.5:
        raise ConfigError(f"model.head.logit_eps={settings.logit_eps}: expected above 0 and below 0.5, such as 1e-5.")
    if settings.two_stage and not settings.refine_boxes:
        raise ConfigError("DeformableDETRHead: two_stage needs refine_boxes=True (model.head.refine_boxes).")
    if settings.mixed_selection != (settings.two_stage and settings.box_positions):
        raise ConfigError(
            f"DeformableDETRHead: mixed_selection={settings.mixed_selection}, two_stage={settings.two_stage}, "
            f"box_positions={settings.box_positions}: with two stages expected mixed_selection and box_positions both, "
            "or neither (model.head); with one stage no mixed_selection."
        )


def anchor_boxes(levels: Levels) -> tuple[Tensor, Tensor]:
    """Return the initial box of each location: around its centre, 0.05 of the image wide, doubling with each level.

    Returns:
        boxes_cxcywh: (B, S, 4) in 0..1 of the un-padded image.
        unusable: (B, S, 1) bool: padding, or a coordinate within 0.01 of 0 or 1.
    """
    centres = levels.centers()
    widths = torch.cat([centres.new_full((n, 2), 0.05 * 2**level) for level, n in enumerate(levels.sizes())])
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
