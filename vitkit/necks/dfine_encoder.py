"""D-FINE's encoder (Peng et al. 2024, https://arxiv.org/abs/2410.13842), whose fusion blocks are those of GELAN."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.hybrid_base import HybridEncoderBase
from vitkit.nn.rep_blocks import ELAN, ConvNorm, CSPRepLayer
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class _Stage(nn.Module):
    """A cross-stage partial layer and a 3x3 convolution."""

    def __init__(self, in_channels: int, out_channels: int, *, num_blocks: int):
        super().__init__()
        self.csp = CSPRepLayer(in_channels, out_channels, num_blocks=num_blocks, expansion=1.0)
        self.conv = ConvNorm(out_channels, out_channels, 3, silu=True)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.conv(self.csp(x, padding_mask), padding_mask)


class SCDown(nn.Module):
    """Halves a map in separate steps for channels and space (Wang et al. 2024, section 3.2,
    https://arxiv.org/abs/2405.14458): a 1x1 convolution, then a 3x3 convolution per channel, without activations."""

    def __init__(self, channels: int):
        super().__init__()
        self.cv1 = ConvNorm(channels, channels, 1, silu=False)
        self.cv2 = ConvNorm(channels, channels, 3, stride=2, groups=channels, silu=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, channels, H, W) -> (B, channels, ceil(H / 2), ceil(W / 2))."""
        return self.cv2(self.cv1(x), padding_mask)


def stage_channels(owner: str, expansion: float, channels: int) -> int:
    """Return the channels of a fusion block's stages, `expansion` times half of the block's.

    Raises:
        ConfigError: there are none.
    """
    width = int(expansion * channels / 2)
    if width < 1:
        raise ConfigError(f"{owner}: expansion={expansion} of out_channels={channels} leaves no channels.")
    return width


@NECKS.register
class DFINEEncoder(HybridEncoderBase):
    """Self-attention within the coarsest map, then fusion of all maps, top-down and bottom-up.

    Args:
        num_blocks: number of blocks in each stage of a fusion block.
        expansion: channels of each stage, as a multiple of half of `out_channels`.
        options: the other arguments of `HybridEncoderBase`.
    Raises:
        ConfigError: the backbone has no map of that name, strides do not double, or stages have no channels.
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
        width = stage_channels(type(self).__name__, expansion, out_channels)
        self.build_fusion(
            lateral=lambda: ConvNorm(out_channels, out_channels, 1, silu=False),
            fuse=lambda: ELAN(
                2 * out_channels,
                out_channels,
                *(_Stage(channels, width, num_blocks=num_blocks) for channels in (out_channels, width)),
                width,
            ),
            downsample=lambda: SCDown(out_channels),
        )
