"""D-FINE's encoder (Peng et al. 2024, https://arxiv.org/abs/2410.13842), whose fusion blocks are those of GELAN."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.hybrid_base import HybridEncoderBase
from vitkit.nn.rep_blocks import ConvNorm, CSPRepLayer
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class RepNCSPELAN4(nn.Module):
    """GELAN's block (Wang et al. 2024, https://arxiv.org/abs/2402.13616): two stages in a row, each of whose outputs
    joins the result.

    Args:
        channels: channels of the output; the input and the first projection have twice as many.
        stage_channels: channels of each stage.
        num_blocks: number of blocks of a stage, see `CSPRepLayer`.
    """

    def __init__(self, channels: int, stage_channels: int, *, num_blocks: int):
        super().__init__()
        self.cv1 = ConvNorm(2 * channels, 2 * channels, 1, silu=True)
        self.cv2 = _Stage(channels, stage_channels, num_blocks=num_blocks)
        self.cv3 = _Stage(stage_channels, stage_channels, num_blocks=num_blocks)
        self.cv4 = ConvNorm(2 * channels + 2 * stage_channels, channels, 1, silu=True)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, 2 * channels, H, W) -> (B, channels, H, W)."""
        skipped, x = self.cv1(x).chunk(2, dim=1)
        first = self.cv2(x, padding_mask)
        return self.cv4(torch.cat([skipped, x, first, self.cv3(first, padding_mask)], dim=1))


class _Stage(nn.Module):
    """A cross-stage partial layer and a 3x3 convolution."""

    def __init__(self, in_channels: int, out_channels: int, *, num_blocks: int):
        super().__init__()
        self.csp = CSPRepLayer(in_channels, out_channels, num_blocks=num_blocks, expansion=1.0)
        self.conv = ConvNorm(out_channels, out_channels, 3, silu=True)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        return self.conv(self.csp(x, padding_mask), padding_mask)


class SCDown(nn.Module):
    """Halves a map by channels and space apart (Wang et al. 2024, section 3.2, https://arxiv.org/abs/2405.14458): a 1x1
    convolution, then a 3x3 convolution of each channel; without activations."""

    def __init__(self, channels: int):
        super().__init__()
        self.cv1 = ConvNorm(channels, channels, 1, silu=False)
        self.cv2 = ConvNorm(channels, channels, 3, stride=2, groups=channels, silu=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, channels, H, W) -> (B, channels, ceil(H / 2), ceil(W / 2))."""
        return self.cv2(self.cv1(x), padding_mask)


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
        stage_channels = int(expansion * out_channels / 2)
        if stage_channels < 1:
            raise ConfigError(
                f"{type(self).__name__}: expansion={expansion} of out_channels={out_channels} leaves no channels."
            )
        self.build_fusion(
            lateral=lambda: ConvNorm(out_channels, out_channels, 1, silu=False),
            fuse=lambda: RepNCSPELAN4(out_channels, stage_channels, num_blocks=num_blocks),
            downsample=lambda: SCDown(out_channels),
        )
