"""DEIMv2's hybrid encoder (Huang et al. 2025, https://arxiv.org/abs/2509.20787), which fuses maps by adding them."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.dfine_encoder import SCDown, stage_channels
from vitkit.necks.hybrid_base import HybridEncoderBase
from vitkit.nn.rep_blocks import ELAN, ConvNorm, RepBlock
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class SplitCSPLayer(nn.Module):
    """A cross-stage partial layer with one projection: half of it joins the result of blocks on the other half."""

    def __init__(self, in_channels: int, channels: int, *, num_blocks: int):
        super().__init__()
        self.conv1 = ConvNorm(in_channels, 2 * channels, 1, silu=True)
        self.blocks = nn.ModuleList(RepBlock(channels) for _ in range(num_blocks))

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, channels, H, W)."""
        skipped, x = self.conv1(x).chunk(2, dim=1)
        for block in self.blocks:
            x = block(x, padding_mask)
        return skipped + x


class FusionStage(nn.Module):
    """A cross-stage partial layer and, in D-FINE's block, a 3x3 convolution."""

    def __init__(self, in_channels: int, channels: int, *, num_blocks: int, convolved: bool):
        super().__init__()
        self.csp = SplitCSPLayer(in_channels, channels, num_blocks=num_blocks)
        self.conv = ConvNorm(channels, channels, 3, silu=True) if convolved else None

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, channels, H, W)."""
        x = self.csp(x, padding_mask)
        return x if self.conv is None else self.conv(x, padding_mask)


FusionBlock = Literal["dfine", "deim"]
"""The block that fuses maps: an `ELAN` with or without a 3x3 convolution at the end of its stages."""


def fusion_block(owner: str, block: FusionBlock, channels: int, *, num_blocks: int, expansion: float) -> ELAN:
    """Return the block that a sum of two maps goes through; the arguments are those of `DEIMv2Encoder`.

    Raises:
        ConfigError: the block is unknown, or has no channels.
    """
    if block not in get_args(FusionBlock):
        raise ConfigError(f"{owner}: block={block!r}: expected 'dfine' or 'deim'.")
    width = stage_channels(owner, expansion, channels)
    first, second = (
        FusionStage(n, width, num_blocks=num_blocks, convolved=block == "dfine") for n in (channels, width)
    )
    return ELAN(channels, channels, first, second, width)


@NECKS.register
class DEIMv2Encoder(HybridEncoderBase):
    """Self-attention within the coarsest map, then fusion of all maps by sums, top-down and bottom-up.

    A map that has `out_channels` already is not projected.

    Args:
        block: the stages of the fusion blocks, see `FusionBlock`.
        num_blocks: number of blocks in each stage.
        expansion: channels of each stage, as a multiple of half of `out_channels`.
        options: the other arguments of `HybridEncoderBase`.
    Raises:
        ConfigError: the backbone has no map of that name, strides do not double, the block is unknown, or stages have
            no channels.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int = 256,
        *,
        block: FusionBlock = "deim",
        num_blocks: int = 3,
        expansion: float = 1.0,
        **options: Any,
    ):
        super().__init__(feature_info, out_channels, **options)
        self.build_fusion(
            lateral=lambda: ConvNorm(out_channels, out_channels, 1, silu=False),
            fuse=lambda: fusion_block(
                type(self).__name__, block, out_channels, num_blocks=num_blocks, expansion=expansion
            ),
            downsample=lambda: SCDown(out_channels),
        )

    def projection(self, in_channels: int, out_channels: int) -> nn.Module:
        return nn.Identity() if in_channels == out_channels else super().projection(in_channels, out_channels)

    def join(self, resized: Tensor, x: Tensor) -> Tensor:
        return resized + x
