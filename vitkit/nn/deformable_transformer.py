"""Transformer layers on multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159).

Reference points and boxes are relative to the unpadded image; `valid_ratios`, (B, levels, 2), is the fraction of each
level's width and height that is not padding, and converts them to the padded maps. S counts the tokens of all levels.

Layers and stacks take
    num_levels, num_points: number of maps, and of locations that each head samples on each of them.
    num_heads, d_ffn, dropout: see `vitkit.nn.transformer`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitkit.errors import DataError
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.layers import FeedForward, init_xavier
from vitkit.nn.position import sine_positions_2d, sine_positions_boxes
from vitkit.ops.images import resize_mask


class Levels(NamedTuple):
    """Maps of several sizes as one sequence, level by level and row by row."""

    tokens: Tensor
    """(B, S, d_model)."""
    positions: Tensor | None
    """(B or 1, S, d_model), including the level embedding; None without one."""
    shapes: list[tuple[int, int]]
    """(H, W) of each level."""
    padding_mask: Tensor | None
    """(B, S) bool, True = padding."""
    valid_ratios: Tensor
    """(B or 1, levels, 2): width and height."""

    def sizes(self) -> list[int]:
        """Return the number of tokens of each level."""
        return [height * width for height, width in self.shapes]

    def split_maps(self, tokens: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Return tokens (B, S, d_model) as maps (B, d_model, H, W) by the names of the levels."""
        parts = zip(names, tokens.split(self.sizes(), dim=1), self.shapes)
        return {name: part.transpose(1, 2).unflatten(2, shape) for name, part, shape in parts}

    def centers(self) -> Tensor:
        """Return the center of every token, relative to the unpadded image.

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

    def around(self, references: Tensor) -> dict[str, Any]:
        """Return the arguments by which a layer attends to the levels around points or boxes of the unpadded image,
        (B, L, 2 or 4)."""
        reference_points = in_padded_maps(references, self.valid_ratios)
        return dict(reference_points=reference_points, shapes=self.shapes, padding_mask=self.padding_mask)


def flatten_levels(
    features: Mapping[str, Tensor],
    level_embed: Tensor | None,
    padding_mask: Tensor | None = None,
    *,
    position_offset: float = 0.0,
    temperature: float = 10000.0,
    strides: Sequence[int] | None = None,
) -> Levels:
    """Concatenate maps into one sequence, with their positions and padding.

    Args:
        features: maps (B, d_model, H, W) in the order of the sequence.
        level_embed: (levels, d_model); None: without positions.
        padding_mask: (B, H, W) bool at the size of the images, True = padding.
        position_offset: offset for `sine_positions_2d`; Deformable DETR uses -0.5.
        temperature: temperature for `sine_positions_2d`.
        strides: pixels between the locations of each map: ratios are then of pixels, see `QueryHead.rounds_padding`.
    """
    maps = list(features.values())
    shapes = [(x.shape[-2], x.shape[-1]) for x in maps]
    masks = [None if padding_mask is None else resize_mask(padding_mask, shape) for shape in shapes]
    positions = None
    if level_embed is not None:
        rule = dict(offset=position_offset, temperature=temperature, device=maps[0].device)
        encodings = [
            sine_positions_2d(shape, x.shape[1], padding_mask=mask, **rule).flatten(1, 2)
            for x, shape, mask in zip(maps, shapes, masks)
        ]
        codes = [embed.expand(height * width, -1) for embed, (height, width) in zip(level_embed, shapes)]
        positions = torch.cat(encodings, dim=1).to(maps[0].dtype) + torch.cat(codes)
    ratios = [unpadded_fractions(mask, shape) for mask, shape in zip(masks, shapes) if mask is not None]
    if ratios and strides is not None:
        ratios = [unpadded_fractions(padding_mask, shape) / stride for shape, stride in zip(shapes, strides)]
    return Levels(
        tokens=torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1),
        positions=positions,
        shapes=shapes,
        padding_mask=torch.cat([mask.flatten(1) for mask in masks], dim=1) if ratios else None,
        valid_ratios=torch.stack(ratios, dim=1) if ratios else torch.ones(1, len(maps), 2, device=maps[0].device),
    )


def unpadded_fractions(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the lengths without padding of the first row and column, in parts of (H, W): (B, h, w) bool -> (B, 2)."""
    # An image that is all padding counts as one pixel, to avoid a division by 0.
    sides = ((mask[:, 0, :], size[1]), (mask[:, :, 0], size[0]))
    return torch.stack([(~side).float().sum(1).clamp(min=1) / length for side, length in sides], dim=-1)


def in_padded_maps(references: Tensor, valid_ratios: Tensor) -> Tensor:
    """Convert points or cxcywh boxes (B, L, 2 or 4) of the unpadded image to each map's: (B, L, levels, 2 or 4)."""
    return references[:, :, None] * valid_ratios.repeat(1, 1, references.shape[-1] // 2)[:, None]


class DeformableEncoderLayer(nn.Module):
    """Deformable self-attention and a feed-forward network, post-norm."""

    activation_checkpointing = False

    def __init__(
        self,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 1024,
        dropout: float = 0.1,
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
    """Encoder in which each token of each level attends to locations around itself on all levels.

    Args:
        options: the other arguments of its layers.
    """

    def __init__(self, num_layers: int, d_model: int, num_levels: int, **options: Any):
        super().__init__()
        self.layers = nn.ModuleList(DeformableEncoderLayer(d_model, num_levels, **options) for _ in range(num_layers))

    def forward(self, levels: Levels) -> Tensor:
        """Return the encoded levels, (B, S, d_model)."""
        x = levels.tokens
        reference_points = in_padded_maps(levels.centers(), levels.valid_ratios).expand(x.shape[0], -1, -1, -1)
        for layer in self.layers:
            x = layer(
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

    def __init__(
        self,
        d_model: int,
        num_levels: int,
        *,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 1024,
        dropout: float = 0.1,
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


def init_deformable(*stacks: nn.Module) -> None:
    """Initialize layers as the original does: by Xavier's distribution, but deformable attention by its own rule."""
    init_xavier(*stacks)
    for module in (module for stack in stacks for module in stack.modules()):
        if isinstance(module, MultiScaleDeformableAttention):
            module.reset_parameters()


def anchor_boxes(levels: Levels) -> tuple[Tensor, Tensor]:
    """Return the initial box of each location: around its center, 0.05 of the image wide, doubling with each level.

    Returns:
        boxes_cxcywh: (B, S, 4) in 0..1 of the unpadded image.
        unusable: (B, S, 1) bool: padding, or a coordinate within 0.01 of 0 or 1.
    """
    centers = levels.centers()
    widths = torch.cat([centers.new_full((n, 2), 0.05 * 2**level) for level, n in enumerate(levels.sizes())])
    boxes = torch.cat([centers, widths.expand_as(centers)], dim=-1)
    unusable = ((boxes <= 0.01) | (boxes >= 0.99)).any(-1, keepdim=True)
    if levels.padding_mask is not None:
        unusable = unusable | levels.padding_mask[..., None]
    return boxes, unusable


def box_codes(reference_points: Tensor, d_model: int) -> Tensor:
    """Encode boxes of the padded maps, (B, L, levels, 4) cxcywh, by those of the first level: (B, L, 2 * d_model)."""
    cx, cy, width, height = reference_points[:, :, 0].unbind(-1)
    # In this order, since published weights expect it.
    return sine_positions_boxes(torch.stack((cy, cx, width, height), dim=-1), d_model)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Select rows of x, (B, S, C), by an index (B, Q): (B, Q, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def check_locations(owner: str, levels: Levels, num_queries: int) -> None:
    """Raise DataError if maps have fewer locations than the queries that are selected from them."""
    if sum(levels.sizes()) < num_queries:
        raise DataError(
            f"{owner}: the maps {levels.shapes} have {sum(levels.sizes())} locations, fewer than the {num_queries} "
            "queries that are selected from them. Use larger images, or fewer queries (model.num_queries, "
            "model.training_queries)."
        )
