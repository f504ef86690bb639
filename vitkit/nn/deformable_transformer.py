"""Transformer layers on multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Reference points and boxes are relative to the un-padded image; `valid_ratios`, (B, levels, 2), is the fraction of each
level's width and height that is not padding, and converts them to the padded maps. S counts the tokens of all levels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.layers import MLP, FeedForward, checkpoint_block, init_xavier
from vitkit.nn.position import sine_positions_2d, sine_positions_boxes
from vitkit.nn.transformer import LayerSettings
from vitkit.ops.boxes import inverse_sigmoid
from vitkit.ops.images import resize_mask


@dataclass(frozen=True)
class DeformableSettings(LayerSettings):
    """Settings of layers with multi-scale deformable attention."""

    d_ffn: int = 1024
    num_points: int = 4
    """Number of locations that each head samples on each level."""


@dataclass(frozen=True)
class DecoderSettings(DeformableSettings):
    """Settings of a decoder's layers; the changes introduced by DINO (Zhang et al. 2022,
    https://arxiv.org/abs/2203.03605) are marked by the sections of its paper."""

    refine_boxes: bool = False
    """Iterative bounding box refinement: the boxes of each layer are the references of the next one."""
    share_heads: bool = False
    """Whether all layers predict with the same heads, even if they refine boxes."""
    box_positions: bool = False
    """Whether each layer computes the queries' positions from their boxes (section 3.1); needs `refine_boxes`."""
    look_forward_twice: bool = False
    """Whether the loss of a layer's boxes also trains the previous layer (section 3.5); needs `refine_boxes`."""
    norm_outputs: bool = False
    """Whether predictions are made from normalised outputs; refined boxes are made from the unnormalised ones."""
    logit_eps: float = 1e-5
    """Distance to 0 and 1 to which box coordinates are clamped, so that their logits are finite."""


class Levels(NamedTuple):
    """Maps of several sizes as one sequence, level by level and row by row."""

    tokens: Tensor
    """(B, S, d_model)."""
    positions: Tensor
    """(B or 1, S, d_model), including the level embedding."""
    shapes: list[tuple[int, int]]
    """(H, W) of each level."""
    padding_mask: Tensor | None
    """(B, S) bool, True = padding."""
    valid_ratios: Tensor
    """(B or 1, levels, 2): width and height."""

    def sizes(self) -> list[int]:
        """Return the number of tokens of each level."""
        return [height * width for height, width in self.shapes]

    def centers(self) -> Tensor:
        """Return the centre of every token, relative to the un-padded image.

        Returns:
            (B, S, 2) float32 as (x, y); above 1 in the padding.
        """
        centers = []
        for (height, width), ratio in zip(self.shapes, self.valid_ratios.unbind(1)):
            y = (torch.arange(height, device=ratio.device) + 0.5) / height
            x = (torch.arange(width, device=ratio.device) + 0.5) / width
            grid = torch.stack((x.expand(height, -1), y[:, None].expand(-1, width)), dim=-1)
            centers.append(grid.flatten(0, 1) / ratio[:, None])
        return torch.cat(centers, dim=1)


def flatten_levels(
    features: Mapping[str, Tensor],
    level_embed: Tensor,
    padding_mask: Tensor | None = None,
    *,
    position_offset: float,
    temperature: float = 10000.0,
) -> Levels:
    """Concatenate maps into one sequence, with their positions and padding.

    Args:
        features: maps (B, d_model, H, W) in the order of the sequence.
        level_embed: (levels, d_model).
        padding_mask: (B, H, W) bool at the size of the images, True = padding.
        position_offset: offset for `sine_positions_2d`; Deformable DETR uses -0.5.
        temperature: temperature for `sine_positions_2d`.
    """
    maps = list(features.values())
    shapes = [(x.shape[-2], x.shape[-1]) for x in maps]
    masks = [None if padding_mask is None else resize_mask(padding_mask, shape) for shape in shapes]
    rule = dict(offset=position_offset, temperature=temperature, device=maps[0].device)
    positions = [
        sine_positions_2d(shape, x.shape[1], padding_mask=mask, **rule).flatten(1, 2)
        for x, shape, mask in zip(maps, shapes, masks)
    ]
    codes = [embed.expand(height * width, -1) for embed, (height, width) in zip(level_embed, shapes)]
    ratios = [_valid_ratio(mask) for mask in masks if mask is not None]
    return Levels(
        tokens=torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1),
        positions=torch.cat(positions, dim=1).to(maps[0].dtype) + torch.cat(codes),
        shapes=shapes,
        padding_mask=torch.cat([mask.flatten(1) for mask in masks], dim=1) if ratios else None,
        valid_ratios=torch.stack(ratios, dim=1) if ratios else torch.ones(1, len(maps), 2, device=maps[0].device),
    )


def _valid_ratio(mask: Tensor) -> Tensor:
    """Return the unpadded fraction of width and height, by the first row and column: (B, H, W) bool -> (B, 2)."""
    # An image that is all padding counts as one pixel, to avoid a division by 0.
    sides = (mask[:, 0, :], mask[:, :, 0])
    return torch.stack([(~side).float().mean(1).clamp(min=1 / side.shape[1]) for side in sides], dim=-1)


def in_padded_maps(references: Tensor, valid_ratios: Tensor) -> Tensor:
    """Convert points or cxcywh boxes (B, L, 2 or 4) of the un-padded image to each map's: (B, L, levels, 2 or 4)."""
    return references[:, :, None] * valid_ratios.repeat(1, 1, references.shape[-1] // 2)[:, None]


class DeformableEncoderLayer(nn.Module):
    """Deformable self-attention and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(self, d_model: int, num_levels: int, settings: DeformableSettings):
        super().__init__()
        heads, points, dropout = settings.num_heads, settings.num_points, settings.dropout
        self.self_attn = MultiScaleDeformableAttention(d_model, heads, num_levels=num_levels, num_points=points)
        self.ffn = FeedForward(d_model, settings.d_ffn, dropout=dropout)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        *,
        reference_points: Tensor,
        shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Apply attention and the feed-forward network.

        Args:
            x: (B, S, d_model).
            positions: (B or 1, S, d_model).
            reference_points: (B, S, levels, 2), see `in_padded_maps`.
            padding_mask: (B, S) bool, True = padding.
        """
        attended = self.self_attn(
            x + positions, x, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.ffn(x)))


class DeformableEncoder(nn.Module):
    """Encoder in which each token of each level attends to locations around itself on all levels."""

    def __init__(self, num_layers: int, d_model: int, num_levels: int, settings: DeformableSettings):
        super().__init__()
        self.layers = nn.ModuleList(DeformableEncoderLayer(d_model, num_levels, settings) for _ in range(num_layers))

    def forward(self, levels: Levels) -> Tensor:
        """Return the encoded levels, (B, S, d_model)."""
        x = levels.tokens
        reference_points = in_padded_maps(levels.centers(), levels.valid_ratios).expand(x.shape[0], -1, -1, -1)
        for layer in self.layers:
            x = checkpoint_block(
                layer,
                x,
                levels.positions,
                reference_points=reference_points,
                shapes=levels.shapes,
                padding_mask=levels.padding_mask,
            )
        return x


class DeformableDecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(self, d_model: int, num_levels: int, settings: DeformableSettings):
        super().__init__()
        heads, points, dropout = settings.num_heads, settings.num_points, settings.dropout
        self.self_attn = MultiHeadAttention(d_model, heads, dropout)
        self.cross_attn = MultiScaleDeformableAttention(d_model, heads, num_levels=num_levels, num_points=points)
        self.ffn = FeedForward(d_model, settings.d_ffn, dropout=dropout)
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
    ) -> Tensor:
        """Apply self-attention, cross-attention to the memory, and the feed-forward network.

        Args:
            x: (B, L, d_model).
            memory: (B, S, d_model).
            positions: (B or 1, L, d_model).
            reference_points: (B, L, levels, 2 or 4), see `in_padded_maps`.
            padding_mask: (B, S) bool, padding of the memory, True = padding.
            bias: bias of the self-attention, float, broadcastable to (B, heads, L, L).
        """
        # The norms are applied in this order, but the original numbers them from the cross-attention on.
        qk = x + positions
        x = self.norm2(x + self.dropout(self.self_attn(qk, qk, x, bias=bias)))
        attended = self.cross_attn(
            x + positions, memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.norm1(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.ffn(x)))


class DecodedLayer(NamedTuple):
    """The output of a decoder layer."""

    states: Tensor
    """(B, L, d_model)."""
    references: Tensor
    """(B, L, 2 or 4): the reference points or boxes that the layer attended around."""
    boxes_cxcywh: Tensor
    """(B, L, 4) in 0..1 of the un-padded image."""


class DeformableDecoder(nn.Module):
    """Decoder whose queries attend to locations around their reference points, and predict boxes relative to them.

    Without `refine_boxes` all layers share one box head and the initial references.

    Raises:
        ConfigError: an option is set without another one that it needs.
    """

    def __init__(self, num_layers: int, d_model: int, num_levels: int, settings: DecoderSettings):
        super().__init__()
        needs_boxes = dict(box_positions=settings.box_positions, look_forward_twice=settings.look_forward_twice)
        for name, is_set in needs_boxes.items():
            if is_set and not settings.refine_boxes:
                raise ConfigError(f"DeformableDecoder: {name} needs refine_boxes=True (model.head.refine_boxes).")
        self.settings = settings
        self.layers = nn.ModuleList(DeformableDecoderLayer(d_model, num_levels, settings) for _ in range(num_layers))
        num_heads = num_layers if settings.refine_boxes and not settings.share_heads else 1
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in range(num_heads))
        self.norm = nn.LayerNorm(d_model) if settings.norm_outputs else nn.Identity()
        if settings.box_positions:
            self.ref_point_head = MLP((2 * d_model, d_model, d_model))
            init_xavier(self.ref_point_head)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        levels: Levels,
        *,
        references: Tensor,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> list[DecodedLayer]:
        """Decode the queries.

        Args:
            x: (B, L, d_model).
            memory: (B, S, d_model), the encoded `levels`.
            references: (B, L, 2) points as (x, y) or (B, L, 4) boxes cxcywh, in 0..1 of the un-padded image.
            positions: (B, L, d_model); None with `box_positions`.
            bias: bias of the self-attention, float, broadcastable to (B, heads, L, L).
        """
        outputs: list[DecodedLayer] = []
        predicted_from = references
        for i, layer in enumerate(self.layers):
            reference_points = in_padded_maps(references, levels.valid_ratios)
            x = checkpoint_block(
                layer,
                x,
                memory,
                positions=self._positions(reference_points, x) if positions is None else positions,
                shapes=levels.shapes,
                padding_mask=levels.padding_mask,
                reference_points=reference_points,
                bias=bias,
            )
            states, box_head = self.norm(x), self.bbox_embed[i % len(self.bbox_embed)]
            boxes = boxes_around(predicted_from, box_head(states), eps=self.settings.logit_eps)
            outputs.append(DecodedLayer(states, references, boxes))
            if self.settings.refine_boxes and i + 1 < len(self.layers):
                refined = boxes
                if self.settings.norm_outputs or self.settings.look_forward_twice:
                    refined = boxes_around(references, box_head(x), eps=self.settings.logit_eps)
                references = refined.detach()
                predicted_from = refined if self.settings.look_forward_twice else references
        return outputs

    def _positions(self, reference_points: Tensor, x: Tensor) -> Tensor:
        """Return the positions of boxes (B, L, levels, 4) in the padded maps; those of the first level are used."""
        cx, cy, width, height = reference_points[:, :, 0].unbind(-1)
        boxes = torch.stack((cy, cx, width, height), dim=-1)  # in the order that DINO's weights expect
        return self.ref_point_head(sine_positions_boxes(boxes, x.shape[-1]).to(x.dtype))


def init_deformable(*stacks: nn.Module) -> None:
    """Initialise layers as the original does: by Xavier's distribution, but deformable attention by its own rule."""
    init_xavier(*stacks)
    for module in (module for stack in stacks for module in stack.modules()):
        if isinstance(module, MultiScaleDeformableAttention):
            module.reset_parameters()


def box_head(d_model: int) -> MLP:
    """Create a box head that initially predicts the reference itself."""
    head = MLP((d_model, d_model, d_model, 4))
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    return head


def boxes_around(references: Tensor, deltas: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Add deltas to reference points or boxes, in logit space.

    Args:
        references: (..., 2) points or (..., 4) boxes cxcywh in 0..1.
        deltas: (..., 4), added before the sigmoid; for a reference point they alone determine the size.
        eps: see `inverse_sigmoid`.
    Returns:
        (..., 4) float32 cxcywh in 0..1.
    """
    logits = inverse_sigmoid(references.float(), eps=eps)
    return (deltas.float() + F.pad(logits, (0, 4 - logits.shape[-1]))).sigmoid()
