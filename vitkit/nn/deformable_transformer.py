"""Transformer layers on multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Reference points and boxes are relative to the un-padded image; `valid_ratios`, (B, levels, 2), is the share of each
level's width and height that is not padding, and places them in the padded maps. S counts the places of all levels.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.layers import MLP, FeedForward, run_block
from vitkit.nn.position import sine_positions_2d
from vitkit.ops.images import resize_mask


class Levels(NamedTuple):
    """Maps of several sizes as one sequence, level by level and row by row."""

    tokens: Tensor
    """(B, S, d_model)."""
    positions: Tensor
    """(B or 1, S, d_model), without a code of the level."""
    shapes: list[tuple[int, int]]
    """(H, W) of each level."""
    padding_mask: Tensor | None
    """(B, S) bool, True = padding."""
    valid_ratios: Tensor
    """(B or 1, levels, 2): width, height."""

    @property
    def sizes(self) -> list[int]:
        """Places of each level."""
        return [height * width for height, width in self.shapes]


def flatten_levels(
    features: Mapping[str, Tensor], padding_mask: Tensor | None = None, *, position_offset: float
) -> Levels:
    """
    Args:
        features: maps (B, d_model, H, W) in the order of the sequence.
        padding_mask: (B, H, W) bool of the images, True = padding.
        position_offset: of `sine_positions_2d`; Deformable DETR has -0.5.
    """
    maps = list(features.values())
    shapes = [(x.shape[-2], x.shape[-1]) for x in maps]
    masks = [None if padding_mask is None else resize_mask(padding_mask, shape) for shape in shapes]
    positions = [
        sine_positions_2d(shape, x.shape[1], padding_mask=mask, offset=position_offset, device=x.device).flatten(1, 2)
        for x, shape, mask in zip(maps, shapes, masks)
    ]
    ratios = [_valid_ratio(mask) for mask in masks if mask is not None]
    return Levels(
        tokens=torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1),
        positions=torch.cat(positions, dim=1).to(maps[0].dtype),
        shapes=shapes,
        padding_mask=torch.cat([mask.flatten(1) for mask in masks], dim=1) if ratios else None,
        valid_ratios=torch.stack(ratios, dim=1) if ratios else torch.ones(1, len(maps), 2, device=maps[0].device),
    )


def _valid_ratio(mask: Tensor) -> Tensor:
    """(B, H, W) bool -> (B, 2): the share of the width and height that is free, on the first row and column."""
    # An image that is all padding counts as one place: no division by 0.
    sides = (mask[:, 0, :], mask[:, :, 0])
    return torch.stack([(~side).float().mean(1).clamp(min=1 / side.shape[1]) for side in sides], dim=-1)


def level_places(shapes: Sequence[tuple[int, int]], valid_ratios: Tensor) -> Tensor:
    """The centre of every place, relative to the un-padded image.

    Returns:
        (B, S, 2) float32 as (x, y); above 1 in the padding.
    """
    places = []
    for (height, width), ratio in zip(shapes, valid_ratios.unbind(1)):
        y = (torch.arange(height, device=ratio.device) + 0.5) / height
        x = (torch.arange(width, device=ratio.device) + 0.5) / width
        grid = torch.stack((x.expand(height, -1), y[:, None].expand(-1, width)), dim=-1)
        places.append(grid.flatten(0, 1) / ratio[:, None])
    return torch.cat(places, dim=1)


def in_padded_maps(references: Tensor, valid_ratios: Tensor) -> Tensor:
    """(B, L, 2 or 4) points or cxcywh boxes of the un-padded image -> (B, L, levels, 2 or 4) of each level's map."""
    return references[:, :, None] * valid_ratios.repeat(1, 1, references.shape[-1] // 2)[:, None]


class DeformableEncoderLayer(nn.Module):
    """Deformable self-attention and a feed-forward network, post-norm."""

    recompute = False

    def __init__(
        self, d_model: int, num_heads: int, *, num_levels: int, num_points: int, d_ffn: int, dropout: float = 0.1
    ):
        super().__init__()
        self.self_attn = MultiScaleDeformableAttention(d_model, num_heads, num_levels=num_levels, num_points=num_points)
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
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
        """
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
    """Every place of every level attends around itself on all levels."""

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        *,
        num_heads: int,
        num_levels: int,
        num_points: int,
        d_ffn: int,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.layers = nn.ModuleList(
            DeformableEncoderLayer(
                d_model, num_heads, num_levels=num_levels, num_points=num_points, d_ffn=d_ffn, dropout=dropout
            )
            for _ in range(num_layers)
        )

    def forward(self, levels: Levels, positions: Tensor) -> Tensor:
        """
        Args:
            positions: (B or 1, S, d_model), with the code of the level.
        Returns:
            (B, S, d_model).
        """
        x = levels.tokens
        places = level_places(levels.shapes, levels.valid_ratios)
        reference_points = in_padded_maps(places, levels.valid_ratios).expand(len(x), -1, -1, -1)
        for layer in self.layers:
            x = run_block(
                layer, x, positions, reference_points=reference_points, shapes=levels.shapes,
                padding_mask=levels.padding_mask,
            )  # fmt: skip
        return x


class DeformableDecoderLayer(nn.Module):
    """Self-attention, deformable cross-attention and a feed-forward network, post-norm."""

    recompute = False

    def __init__(
        self, d_model: int, num_heads: int, *, num_levels: int, num_points: int, d_ffn: int, dropout: float = 0.1
    ):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, dropout)
        self.cross_attn = MultiScaleDeformableAttention(
            d_model, num_heads, num_levels=num_levels, num_points=num_points
        )
        self.ffn = FeedForward(d_model, d_ffn, dropout=dropout)
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
    ) -> Tensor:
        """
        Args:
            x: (B, L, d_model).
            memory: (B, S, d_model).
            positions: (B or 1, L, d_model).
            reference_points: (B, L, levels, 2 or 4), see `in_padded_maps`.
            padding_mask: (B, S) bool of the memory, True = padding.
        """
        # The norms are applied in this order, but the original counts them from the cross-attention on.
        qk = x + positions
        x = self.norm2(x + self.dropout(self.self_attn(qk, qk, x)))
        attended = self.cross_attn(
            x + positions, memory, reference_points=reference_points, shapes=shapes, padding_mask=padding_mask
        )
        x = self.norm1(x + self.dropout(attended))
        return self.norm3(x + self.dropout(self.ffn(x)))


class DecodedLayer(NamedTuple):
    """What one decoder layer gives."""

    states: Tensor
    """(B, L, d_model)."""
    references: Tensor
    """(B, L, 2 or 4): where the layer looked."""
    boxes_cxcywh: Tensor
    """(B, L, 4) in 0..1 of the un-padded image."""


class DeformableDecoder(nn.Module):
    """Queries look around their reference points, and predict boxes relative to them.

    Args:
        refine_boxes: each layer has a box head of its own, and its boxes are the next layer's references; otherwise all
            layers share one box head and the first references.
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int,
        *,
        num_heads: int,
        num_levels: int,
        num_points: int,
        d_ffn: int,
        dropout: float = 0.1,
        refine_boxes: bool = False,
    ):
        super().__init__()
        self.refine_boxes = refine_boxes
        self.layers = nn.ModuleList(
            DeformableDecoderLayer(
                d_model, num_heads, num_levels=num_levels, num_points=num_points, d_ffn=d_ffn, dropout=dropout
            )
            for _ in range(num_layers)
        )
        self.bbox_embed = nn.ModuleList(box_head(d_model) for _ in range(num_layers if refine_boxes else 1))

    def forward(
        self, x: Tensor, memory: Tensor, levels: Levels, *, positions: Tensor, references: Tensor
    ) -> list[DecodedLayer]:
        """
        Args:
            x: (B, L, d_model).
            memory: (B, S, d_model), the encoded `levels`.
            positions: (B, L, d_model).
            references: (B, L, 2) points as (x, y) or (B, L, 4) boxes cxcywh, in 0..1 of the un-padded image.
        """
        outputs = []
        for i, layer in enumerate(self.layers):
            x = run_block(
                layer, x, memory, positions=positions, shapes=levels.shapes, padding_mask=levels.padding_mask,
                reference_points=in_padded_maps(references, levels.valid_ratios),
            )  # fmt: skip
            boxes = boxes_around(references, self.bbox_embed[i if self.refine_boxes else 0](x))
            outputs.append(DecodedLayer(x, references, boxes))
            if self.refine_boxes:
                references = boxes.detach()
        return outputs


def box_head(d_model: int) -> MLP:
    """Predicts nothing but the reference at first."""
    head = MLP((d_model, d_model, d_model, 4))
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
    return head


def boxes_around(references: Tensor, deltas: Tensor) -> Tensor:
    """
    Args:
        references: (..., 2) points or (..., 4) boxes cxcywh in 0..1.
        deltas: (..., 4), added to them before the sigmoid; of a point's box they give the size alone.
    Returns:
        (..., 4) float32 cxcywh in 0..1.
    """
    logits = torch.logit(references.float(), eps=1e-5)
    return (deltas.float() + F.pad(logits, (0, 4 - logits.shape[-1]))).sigmoid()
