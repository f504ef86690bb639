"""Multi-scale deformable attention (Zhu et al. 2021, https://arxiv.org/abs/2010.04159) without a compiled extension.

Shapes: B batch, L queries, S places of all levels together, d channels per head. Locations are (x, y) in 0..1 of a
level's map, corner to corner; masks are bool with True = padding.
"""

import math
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import attention_weights


def deformable_attend(
    values: Tensor, shapes: Sequence[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sum of values sampled at a few places of every level, bilinearly; places outside a map give 0.

    Args:
        values: (B, S, heads, d), the levels one after the other, each row by row.
        shapes: (H, W) per level; their areas sum to S.
        sampling_locations: (B, L, heads, levels, points, 2).
        weights: (B, L, heads, levels, points).
    Returns:
        (B, L, heads * d), of the values' type; sums are in float32 at least.
    Raises:
        ValueError: the shapes do not fit each other.
    """
    shapes = [(int(height), int(width)) for height, width in shapes]
    _check(values, shapes, sampling_locations, weights)
    return _attend_by_gathering(values, shapes, sampling_locations, weights)


def _check(values: Tensor, shapes: list[tuple[int, int]], sampling_locations: Tensor, weights: Tensor) -> None:
    places = sum(height * width for height, width in shapes)
    if values.shape[1] != places:
        raise ValueError(
            f"deformable_attend: values have {values.shape[1]} places, but the levels {shapes} have {places}."
        )
    levels = sampling_locations.shape[3]
    if levels != len(shapes):
        raise ValueError(f"deformable_attend: sampling_locations are for {levels} levels, shapes for {len(shapes)}.")
    if sampling_locations.shape != (*weights.shape, 2):
        raise ValueError(
            f"deformable_attend: sampling_locations {tuple(sampling_locations.shape)} must be the weights' shape "
            f"{tuple(weights.shape)} with 2 behind it."
        )


def _attend_by_gathering(
    values: Tensor, shapes: list[tuple[int, int]], sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    dtype = torch.promote_types(values.dtype, torch.float32)
    table = values.to(dtype).transpose(1, 2)  # (B, heads, S, d)
    output = 0
    start = 0
    for level, (height, width) in enumerate(shapes):
        places = sampling_locations[:, :, :, level].to(dtype).transpose(1, 2)  # (B, heads, L, points, 2)
        level_weights = weights[:, :, :, level].to(dtype).transpose(1, 2)
        x, y = places[..., 0] * width - 0.5, places[..., 1] * height - 0.5
        left, top = x.floor(), y.floor()
        for column, row in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
            share = (1 - (x - column).abs()) * (1 - (y - row).abs()) * level_weights
            inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            index = start + row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
            share = torch.where(inside, share, 0)
            rows = table.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, table.shape[-1]))
            output = output + (rows.unflatten(2, index.shape[2:]) * share[..., None]).sum(3)
        start += height * width
    return output.transpose(1, 2).flatten(2).to(values.dtype)


class MultiScaleDeformableAttention(nn.Module):
    """Every query reads a few places around its reference point on every level, at offsets it predicts itself.

    Args:
        d_model: channels of queries, memory and output.
        num_heads: a divisor of `d_model`.
        num_levels: maps in the memory.
        num_points: places per head and level.
    Raises:
        ConfigError: `num_heads` does not divide `d_model`.
    """

    def __init__(self, d_model: int, num_heads: int, *, num_levels: int, num_points: int):
        super().__init__()
        if d_model % num_heads:
            raise ConfigError(f"MultiScaleDeformableAttention: num_heads={num_heads} must divide d_model={d_model}.")
        self.num_heads = num_heads
        self.num_levels = num_levels
        self.num_points = num_points
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(d_model, 2 * samples)
        self.attention_weights = nn.Linear(d_model, samples)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)
        self.samples: list[tuple[Tensor, Tensor]] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts with equal weights at 1, 2, ... cells from the reference point, each head in a direction of its own.

        A model that initialises all its matrices in one way calls this again afterwards.
        """
        angles = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        directions = torch.stack((angles.cos(), angles.sin()), dim=-1)
        directions = directions / directions.abs().amax(-1, keepdim=True)
        steps = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        offsets = (directions[:, None, None] * steps[:, None]).expand(-1, self.num_levels, -1, -1)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(offsets.flatten())
        nn.init.zeros_(self.sampling_offsets.weight)
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
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
        """
        Args:
            queries: (B, L, d_model).
            memory: (B, S, d_model), the levels one after the other.
            reference_points: (B, L, levels, 2) as (x, y), or (B, L, levels, 4) as cxcywh, in 0..1 of each level's map.
            shapes: (H, W) per level.
            padding_mask: (B, S) bool, True = padding, which reads as 0.
        Returns:
            (B, L, d_model).
        Raises:
            ValueError: the number of levels, places or coordinates is not as above.
        """
        values = self.value_proj(memory)
        if padding_mask is not None:
            values = values.masked_fill(padding_mask[..., None], 0)
        values = values.unflatten(-1, (self.num_heads, -1))
        locations = self._sampling_locations(queries, reference_points, shapes)
        scores = self.attention_weights(queries).unflatten(-1, (self.num_heads, -1))
        weights = attention_weights(scores).unflatten(-1, (self.num_levels, -1)).to(values.dtype)
        if self.samples is not None:
            self.samples.append((locations, weights))
        return self.output_proj(deformable_attend(values, shapes, locations, weights))

    def _sampling_locations(
        self, queries: Tensor, reference_points: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        """(B, L, heads, levels, points, 2) float32."""
        if len(shapes) != self.num_levels or reference_points.shape[2] != self.num_levels:
            raise ValueError(
                f"MultiScaleDeformableAttention: num_levels={self.num_levels}, but got {len(shapes)} shapes and "
                f"reference points for {reference_points.shape[2]} levels."
            )
        offsets = self.sampling_offsets(queries).float()
        offsets = offsets.unflatten(-1, (self.num_heads, self.num_levels, self.num_points, 2))
        centers = reference_points[:, :, None, :, None, :2]
        if reference_points.shape[-1] == 2:
            sizes = offsets.new_tensor([(width, height) for height, width in shapes])
            return centers + offsets / sizes[:, None]
        if reference_points.shape[-1] == 4:
            sizes = reference_points[:, :, None, :, None, 2:]
            return centers + offsets * sizes * (0.5 / self.num_points)
        raise ValueError(
            "MultiScaleDeformableAttention: reference points have 2 coordinates (x, y) or 4 (cxcywh), "
            f"got {reference_points.shape[-1]}."
        )


class SamplingRecorder:
    """Collects where a model's deformable attention looks, and how much, while the `with` block lasts.

        with SamplingRecorder(model) as samples:
            model(images, padding_mask)
        locations, weights = samples["head.decoder.layers.5.cross_attn"][0]

    `samples` has one list per `MultiScaleDeformableAttention`, under its dotted name, with one entry per call:
    locations (B, L, heads, levels, points, 2) and weights (B, L, heads, levels, points), both in the autograd graph.
    Compiled models run uncompiled meanwhile.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.samples: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __enter__(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        for name, module in self._attentions():
            assert module.samples is None, "samples are already being recorded"
            module.samples = self.samples.setdefault(name, [])
        return self.samples

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, module in self._attentions():
            module.samples = None
        self._eager.__exit__(kind, error, trace)

    def _attentions(self) -> list[tuple[str, MultiScaleDeformableAttention]]:
        modules = self.model.named_modules()
        return [(name, module) for name, module in modules if isinstance(module, MultiScaleDeformableAttention)]
