"""RT-DETR's hybrid encoder (Zhao et al. 2023, section 4.2, https://arxiv.org/abs/2304.08069)."""

from collections.abc import Mapping, Sequence

from vitkit.necks.hybrid_base import HybridEncoderBase
from vitkit.nn.rep_blocks import ConvNorm, CSPRepLayer
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


@NECKS.register
class HybridEncoder(HybridEncoderBase):
    """Self-attention within the coarsest map, then fusion of all maps, top-down and bottom-up.

    Args:
        num_blocks, expansion: of the fusion blocks, see `CSPRepLayer`. The other arguments are those of
            `HybridEncoderBase`.
    Raises:
        ConfigError: the backbone has no map of that name, or strides do not double.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int = 256,
        *,
        in_features: Sequence[str] | None = None,
        num_heads: int = 8,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        num_blocks: int = 3,
        expansion: float = 1.0,
        isolate_padding: bool = False,
    ):
        super().__init__(
            feature_info,
            out_channels,
            in_features=in_features,
            num_heads=num_heads,
            d_ffn=d_ffn,
            dropout=dropout,
            isolate_padding=isolate_padding,
        )
        self.build_fusion(
            lateral=lambda: ConvNorm(out_channels, out_channels, 1, silu=True),
            fuse=lambda: CSPRepLayer(2 * out_channels, out_channels, num_blocks=num_blocks, expansion=expansion),
            downsample=lambda: ConvNorm(out_channels, out_channels, 3, stride=2, silu=True),
        )
