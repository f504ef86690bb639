"""RT-DETR's hybrid encoder (Zhao et al. 2023, section 4.2, https://arxiv.org/abs/2304.08069)."""

from collections.abc import Mapping
from typing import Any

from vitkit.necks.hybrid_base import HybridEncoderBase
from vitkit.nn.rep_blocks import ConvNorm, CSPRepLayer
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


@NECKS.register
class HybridEncoder(HybridEncoderBase):
    """Self-attention within the coarsest map, then fusion of all maps, top-down and bottom-up.

    Args:
        num_blocks, expansion: of the fusion blocks, see `CSPRepLayer`.
        options: the other arguments of `HybridEncoderBase`.
    Raises:
        ConfigError: the backbone has no map of that name, or strides do not double.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int = 256,
        *,
        num_blocks: int = 3,
        expansion: float = 1.0,
        **options: Any,
    ):
        super().__init__(feature_info, out_channels, **options)
        self.build_fusion(
            lateral=lambda: ConvNorm(out_channels, out_channels, 1, silu=True),
            fuse=lambda: CSPRepLayer(2 * out_channels, out_channels, num_blocks=num_blocks, expansion=expansion),
            downsample=lambda: ConvNorm(out_channels, out_channels, 3, stride=2, silu=True),
        )
