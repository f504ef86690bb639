"""DETR's head: a transformer over one map's locations, and a set of queries that it turns into boxes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.denoising import BoxDenoising, DenoisingSettings
from vitkit.nn.layers import MLP, init_xavier
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.query_groups import GroupQueries, GroupSettings
from vitkit.nn.training_queries import DenoisingQueries, QueryLayout
from vitkit.nn.transformer import EncoderDecoderSettings, TransformerDecoder, TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import HEADS
from vitkit.structures import DetectionTarget, FeatureInfo

POSITIONS = ("sine", "sine_input", "learned", "none")
NUM_LEARNED = 50
"""Number of rows and columns with a learned position, as in the original; rows and columns beyond use the last one."""


class Decoded(NamedTuple):
    """The transformer's results."""

    states: Tensor
    """(layers, B, Q, d_model), the decoded queries of each layer."""
    memory: Tensor
    """(B, d_model, h, w), the encoded map."""
    padding_mask: Tensor | None
    """(B, h, w) bool, True = padding."""
    layout: QueryLayout
    """The groups that the Q rows belong to."""


class TransformerHead(nn.Module):
    """Base of heads with DETR's transformer; a subclass calls `make_transformer` in its constructor."""

    def make_transformer(
        self, num_queries: int, settings: EncoderDecoderSettings, query_groups: GroupSettings = GroupSettings()
    ) -> None:
        """Create the queries, an encoder and a decoder."""
        self.d_model = settings.d_model
        self.encoder = TransformerEncoder(settings.num_encoder_layers, self.d_model, settings)
        self.decoder = TransformerDecoder(settings.num_decoder_layers, self.d_model, settings)
        init_xavier(self.encoder, self.decoder)
        if settings.positions not in POSITIONS:
            raise ConfigError(f"model.head.positions: got {settings.positions!r}; expected one of {POSITIONS}.")
        self.positions = settings.positions
        if self.positions == "learned":
            self.row_embed = nn.Embedding(NUM_LEARNED, self.d_model // 2)
            self.col_embed = nn.Embedding(NUM_LEARNED, self.d_model // 2)
            nn.init.uniform_(self.row_embed.weight)
            nn.init.uniform_(self.col_embed.weight)
        self.query_embed = nn.Embedding(num_queries, self.d_model)
        self.group_queries = GroupQueries(query_groups, num_queries, self.d_model)

    def transform(
        self, image: Tensor, padding_mask: Tensor | None = None, noised: DenoisingQueries | None = None
    ) -> Decoded:
        """Encode a map (B, d_model, h, w) and decode the queries, with those from noised targets first."""
        size = image.shape[-2:]
        bias = None
        if padding_mask is not None:
            padding_mask = resize_mask(padding_mask, size)
            bias = padding_bias(padding_mask.flatten(1), image.dtype)
        tokens = image.flatten(2).transpose(1, 2)
        positions = self.encode_positions(size, padding_mask, image)
        if self.positions == "sine_input":
            tokens, positions = tokens + positions, None
        memory = self.encoder(tokens, positions, bias=bias)
        queries = self.group_queries.before(self.query_embed.weight).expand(image.shape[0], -1, -1)  # (B, Q, d_model)
        layout = self.group_queries.layout(noised)
        content = torch.zeros_like(queries)
        if noised is not None:
            content = torch.cat((noised.content, content), dim=1)
            queries = torch.cat((self.denoising.positions(noised), queries), dim=1)
        states = self.decoder(
            content,
            memory,
            positions=queries,
            memory_positions=positions,
            bias=layout.attention_bias(memory),
            memory_bias=bias,
        )
        return Decoded(states, memory.transpose(1, 2).unflatten(2, size), padding_mask, layout)

    def encode_positions(self, size: tuple[int, int], padding_mask: Tensor | None, image: Tensor) -> Tensor | None:
        """Return the positions of a map's locations, (B or 1, h * w, d_model); None if the head uses no positions."""
        if self.positions == "none":
            return None
        if self.positions == "learned":
            rows, columns = (torch.arange(n, device=image.device).clamp(max=NUM_LEARNED - 1) for n in size)
            parts = self.row_embed(rows)[:, None], self.col_embed(columns)[None]
            return torch.cat([part.expand(*size, -1) for part in parts], dim=-1).flatten(0, 1)[None].to(image.dtype)
        positions = sine_positions_2d(size, self.d_model, padding_mask=padding_mask, device=image.device)
        return positions.flatten(1, 2).to(image.dtype)


@HEADS.register
class DETRHead(TransformerHead):
    """DETR's head (Carion et al. 2020, https://arxiv.org/abs/2005.12872), which reads the coarsest map.

    Args:
        feature_info: description of the neck's maps; the coarsest must have `d_model` channels.
        num_classes: number of classes, without "no object".
        num_queries: number of boxes predicted per image.
        denoising: see `DenoisingSettings` (DN-DETR).
        query_groups: further queries in training (Group DETR, H-DETR).
    Raises:
        ConfigError: the map does not have `d_model` channels.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: EncoderDecoderSettings = EncoderDecoderSettings(),
        denoising: DenoisingSettings = DenoisingSettings(),
        query_groups: GroupSettings = GroupSettings(),
    ):
        super().__init__()
        d_model = settings.d_model
        self.feature_name, info = list(feature_info.items())[-1]
        if info.channels != d_model:
            raise ConfigError(
                f"DETRHead: d_model={d_model}, but feature {self.feature_name!r} has {info.channels} channels: "
                "set both to the same number (model.neck.out_channels, model.head.d_model)."
            )
        if num_queries < 1:
            raise ConfigError(f"DETRHead: num_queries={num_queries}, expected at least 1.")
        self.num_heads = settings.num_heads
        self.make_transformer(num_queries, settings, query_groups)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.bbox_embed = MLP((d_model, d_model, d_model, 4))
        self.denoising = BoxDenoising(num_classes, d_model, denoising, embeds_boxes=True)

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
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            denoising: with targets, the same three for the noised queries, see `QueryLayout`.
            groups, one_to_many: in training, the same for further groups of queries, see `QueryLayout`.
        """
        noised = self.denoising(targets) if self.denoising.is_enabled and targets is not None else None
        return self.predict(self.transform(features[self.feature_name], padding_mask, noised))

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Decoded:
        """Return the decoded queries, before classes and boxes are predicted; arguments as in `forward`."""
        return self.transform(features[self.feature_name], padding_mask)

    def predict(self, decoded: Decoded) -> dict[str, Any]:
        """Predict classes and boxes from all layers, returned as by `forward`."""
        logits, boxes = self.class_embed(decoded.states), self.bbox_embed(decoded.states).sigmoid()
        layers = [dict(pred_logits=l, pred_boxes=b) for l, b in zip(logits.unbind(), boxes.unbind())]
        return decoded.layout.outputs(layers)
