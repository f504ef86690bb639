"""Multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159) without a compiled extension.

Shapes: B batch, L queries, S locations on all levels together. Sampling locations are (x, y) in 0..1 of a level's map,
from corner to corner; masks are bool with True = padding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.deformable_attention import deformable_attend
from vitkit.nn.attention import attention_weights
from vitkit.nn.layers import Linear


class MultiScaleDeformableAttention(nn.Module):
    """Attention of each query to a few locations per level around its reference point, at offsets that it predicts.

    Args:
        d_model: channels of queries, memory and output.
        num_heads: number of heads, a divisor of `d_model`.
        num_levels: number of maps in the memory.
        num_points: number of locations per head and level; a list: of each level.
        projections: whether values and output are projected; False: the memory's channels are the values of the heads,
            and their sums the output.
        offset_scale: around a box, an offset of 1 moves a location by this fraction of its width and height, divided by
            the level's number of points.
    Raises:
        ConfigError: `num_heads` does not divide `d_model`, the numbers of points do not fit the levels, or
            `offset_scale` is not positive.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_levels: int,
        num_points: int | Sequence[int],
        projections: bool = True,
        offset_scale: float = 0.5,
    ):
        super().__init__()
        if d_model % num_heads:
            raise ConfigError(f"MultiScaleDeformableAttention: num_heads={num_heads} must divide d_model={d_model}.")
        points = [num_points] * num_levels if isinstance(num_points, int) else list(num_points)
        if num_levels < 1 or min(points, default=0) < 1:
            raise ConfigError(
                f"MultiScaleDeformableAttention: num_levels={num_levels}, num_points={num_points}: expected at least 1."
            )
        if len(points) != num_levels:
            raise ConfigError(
                f"MultiScaleDeformableAttention: num_points={num_points} are for {len(points)} levels, but there are "
                f"{num_levels}. Set the backbone's out_features to {len(points)} maps, or give one number per level."
            )
        if offset_scale <= 0:
            raise ConfigError(f"MultiScaleDeformableAttention: offset_scale={offset_scale}: expected a value above 0.")
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.offset_scale = offset_scale
        self.num_points = points
        # Sums are over groups of equally many points, so a level with more points has several groups.
        self.group_size = math.gcd(*points)
        self.levels = [level for level, number in enumerate(points) for _ in range(number // self.group_size)]
        samples = num_heads * sum(points)
        self.sampling_offsets = Linear(d_model, 2 * samples)
        self.attention_weights = Linear(d_model, samples)
        self.value_proj = Linear(d_model, d_model) if projections else nn.Identity()
        self.output_proj = Linear(d_model, d_model) if projections else nn.Identity()
        self.samples: list[tuple[Tensor, Tensor]] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with equal weights at 1, 2, ... pixels from the reference point, each head in a different
        direction.

        A model that initializes all its matrices in the same way has to call this again afterwards.
        """
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        steps = torch.cat([torch.arange(1, points + 1, dtype=torch.float32) for points in self.num_points])
        offsets = directions[:, None] * steps[:, None]
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        queries: Tensor,
        memory: Tensor,
        *,
        reference_points: Tensor,
        shapes: Sequence[tuple[int, int]],
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from queries to memory.

        Args:
            queries: (B, L, d_model).
            memory: (B, S, d_model), the levels concatenated.
            reference_points: (B, L, levels, 2) as (x, y), or (B, L, levels, 4) as cxcywh, in 0..1 of each level's map.
            shapes: (H, W) of each level.
            padding_mask: (B, S) bool, True = padding, whose values count as 0.
        Returns:
            (B, L, d_model).
        Raises:
            ValueError: the number of levels, locations or coordinates does not match the shapes above.
        """
        values = self.value_proj(memory)
        if padding_mask is not None:
            values = values.masked_fill(padding_mask[..., None], 0)
        values = values.unflatten(-1, (self.num_heads, -1))
        locations = self._sampling_locations(queries, reference_points, shapes)
        scores = self.attention_weights(queries).unflatten(-1, (self.num_heads, -1))
        weights = attention_weights(scores).unflatten(-1, (-1, self.group_size)).to(values.dtype)
        if self.samples is not None:
            self.samples.append((locations, weights))
        return self.output_proj(deformable_attend(values, shapes, locations, weights, levels=self.levels))

    def _sampling_locations(
        self, queries: Tensor, reference_points: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Return the sampling locations, (B, L, heads, groups, points, 2), in float32 or higher precision."""
        if len(shapes) != self.num_levels or reference_points.shape[2] != self.num_levels:
            raise ValueError(
                f"MultiScaleDeformableAttention: num_levels={self.num_levels}, but got {len(shapes)} shapes and "
                f"reference points for {reference_points.shape[2]} levels."
            )
        offsets = self.sampling_offsets(queries)
        offsets = offsets.to(torch.promote_types(offsets.dtype, torch.float32))
        offsets = offsets.unflatten(-1, (self.num_heads, -1))
        centers = self._for_points(reference_points[..., :2])
        if reference_points.shape[-1] == 2:
            # Filled one by one: an exported graph would store sizes that were passed to new_tensor as constants.
            sides = [offsets.new_full((1,), side) for height, width in shapes for side in (width, height)]
            sizes = torch.cat(sides).view(-1, 2)
            locations = centers + offsets / self._for_points(sizes)
        elif reference_points.shape[-1] == 4:
            levels = zip(reference_points[..., 2:].split(1, dim=-2), self.num_points)
            sizes = torch.cat([size * (self.offset_scale / points) for size, points in levels], dim=-2)
            locations = centers + offsets * self._for_points(sizes)
        else:
            raise ValueError(
                "MultiScaleDeformableAttention: reference points have 2 coordinates (x, y) or 4 (cxcywh), "
                f"got {reference_points.shape[-1]}."
            )
        return locations.unflatten(-1, (-1, self.group_size, 2))

    def _for_points(self, x: Tensor) -> Tensor:
        """Repeat (..., levels, 2) for the points of each level, as (..., 1, sum of points * 2)."""
        levels = zip(x.split(1, dim=-2), self.num_points)
        repeated = torch.cat([level.expand(*x.shape[:-2], points, 2) for level, points in levels], dim=-2)
        # Operations on long rows are much faster.
        return repeated.flatten(-2)[..., None, :]
