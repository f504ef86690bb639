"""RT-DETRv2 (Lv et al. 2024, https://arxiv.org/abs/2407.17140): RT-DETR with another way of sampling the maps."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.heads.rt_detr import RTDETRHead
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.registry import HEADS, Spec
from vitkit.structures import FeatureInfo


class DiscreteDeformableAttention(MultiScaleDeformableAttention):
    """Deformable attention to the pixels nearest to its locations, which trains no offsets (section 3.2).

    It is for devices without bilinear sampling. Its arguments are those of `MultiScaleDeformableAttention`.
    """

    def reset_parameters(self) -> None:
        """See `MultiScaleDeformableAttention`."""
        super().reset_parameters()
        self.sampling_offsets.requires_grad_(False)

    def _sampling_locations(
        self, queries: Tensor, reference_points: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        locations = super()._sampling_locations(queries, reference_points, shapes)
        sides = [side for level in self.levels for side in reversed(shapes[level])]
        # Filled one by one: an exported graph would store sizes that were passed to new_tensor as constants.
        sizes = torch.cat([locations.new_full((1,), side) for side in sides]).view(-1, 1, 2)
        # The original rounds half a pixel too high, and the published weights expect it.
        pixels = (locations.detach() * sizes + 0.5).trunc()
        return (pixels.clamp(min=0).minimum(sizes - 1) + 0.5) / sizes


_ATTENTIONS = {"bilinear": MultiScaleDeformableAttention, "discrete": DiscreteDeformableAttention}


@HEADS.register
class RTDETRv2Head(RTDETRHead):
    """RT-DETR's decoder with a number of sampling points per level, and bilinear or discrete sampling.

    Args:
        num_points: locations per head and level; a list: of each level.
        offset_scale: offset of a location by one unit, as a fraction of the box's width and height, divided by the
            level's number of points.
        sampling: "bilinear", or "discrete": the nearest pixel, see `DiscreteDeformableAttention`.
        feature_info, num_classes, num_queries, d_model, num_heads, d_ffn, dropout, num_decoder_layers, masks:
            see `RTDETRHead`.
    Raises:
        ConfigError: `sampling` is unknown, `offset_scale` is not positive, or there is not one number of points per
            level.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        d_model: int = 256,
        num_heads: int = 8,
        num_points: int | Sequence[int] = 4,
        offset_scale: float = 0.5,
        sampling: Literal["bilinear", "discrete"] = "bilinear",
        d_ffn: int = 1024,
        dropout: float = 0.0,
        num_decoder_layers: int = 6,
        masks: Spec | None = None,
    ):
        if sampling not in _ATTENTIONS:
            raise ConfigError(f"RTDETRv2Head: sampling={sampling!r}: expected 'bilinear' or 'discrete'.")
        super().__init__(
            feature_info,
            num_classes,
            num_queries=num_queries,
            d_model=d_model,
            num_heads=num_heads,
            d_ffn=d_ffn,
            dropout=dropout,
            num_decoder_layers=num_decoder_layers,
            masks=masks,
        )
        for layer in self.decoder.layers:
            layer.cross_attn = _ATTENTIONS[sampling](
                d_model, num_heads, num_levels=len(feature_info), num_points=num_points, offset_scale=offset_scale
            )
