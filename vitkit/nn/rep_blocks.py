"""Convolutions with batch norms, and blocks whose branches can be merged into one convolution after training.

Modules take a padding mask, (B, H, W) bool of any size, True = padding, which then counts as zero; None: padding is
treated like the image.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from vitkit.kernels.norm_activation import norm_silu
from vitkit.nn.layers import conv_norm, is_watched, merge_norm_unrounded
from vitkit.nn.padding import zero_padding


class ConvNorm(Conv2dNormActivation):
    """Convolution without bias, batch norm, and optionally SiLU."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1, silu: bool
    ):
        activation = nn.SiLU if silu else None
        super().__init__(
            in_channels, out_channels, kernel_size, stride, groups=groups, activation_layer=activation, inplace=None
        )

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, ceil(H / stride), ceil(W / stride))."""
        conv, norm, *activation = self
        x = zero_padding(x, padding_mask) if conv.kernel_size != (1, 1) else x
        if activation and type(norm) is nn.BatchNorm2d and norm.training:
            return norm_silu(conv(x), norm)
        x = conv_norm(x, conv, norm)
        return F.silu(x, inplace=not torch.is_grad_enabled()) if activation else x

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`."""
        from vitkit.nn.fusion import can_fold, fold  # read only when a model is fused

        conv, norm, *activation = self
        return fold(conv, norm, "silu" if activation else None) if can_fold(conv, norm) else self


class RepBlock(nn.Module):
    """RepVGG's block: the sum of a 3x3 and a 1x1 convolution (Ding et al. 2021, https://arxiv.org/abs/2101.03697)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, silu=False)
        self.conv2 = ConvNorm(channels, channels, 1, silu=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, channels, H, W) -> the same."""
        return F.silu(self.conv1(x, padding_mask) + self.conv2(x), inplace=not torch.is_grad_enabled())

    def fused(self) -> nn.Module:
        """See `vitkit.protocols.fusing`: one convolution."""
        from vitkit.nn.fusion import FusedConv, can_fold  # read only when a model is fused

        for branch in (self.conv1, self.conv2):
            if type(branch) is not ConvNorm or len(branch) != 2 or is_watched(branch) or not can_fold(*branch):
                return self
        (weight, bias), (weight2, bias2) = merge_norm_unrounded(*self.conv1), merge_norm_unrounded(*self.conv2)
        # A 1x1 convolution is a 3x3 one whose weights are zero but in the center.
        return FusedConv(self.conv1[0], weight + F.pad(weight2, [1, 1, 1, 1]), bias + bias2, "silu")


class CSPRepLayer(nn.Module):
    """The fusion block: the sum of a projection and of blocks on another projection, both of the input.

    Args:
        expansion: channels inside, as a multiple of `out_channels`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, num_blocks: int, expansion: float):
        super().__init__()
        channels = int(out_channels * expansion)
        self.conv1 = ConvNorm(in_channels, channels, 1, silu=True)
        self.conv2 = ConvNorm(in_channels, channels, 1, silu=True)
        self.blocks = nn.ModuleList(RepBlock(channels) for _ in range(num_blocks))
        self.conv3 = ConvNorm(channels, out_channels, 1, silu=True) if channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H, W)."""
        projected, x = self.conv2(x), self.conv1(x)
        for block in self.blocks:
            x = block(x, padding_mask)
        return self.conv3(x + projected)


class ELAN(nn.Module):
    """GELAN's block (Wang et al. 2024, https://arxiv.org/abs/2402.13616): two stages in a row, each of whose outputs
    joins the result.

    Args:
        in_channels, channels: those of the input and the output; the first projection has twice as many as the output.
        first, second: the stages, from `channels` and from `stage_channels` to `stage_channels`; called with the
            padding mask.
    """

    def __init__(self, in_channels: int, channels: int, first: nn.Module, second: nn.Module, stage_channels: int):
        super().__init__()
        self.cv1 = ConvNorm(in_channels, 2 * channels, 1, silu=True)
        self.cv2 = first
        self.cv3 = second
        self.cv4 = ConvNorm(2 * channels + 2 * stage_channels, channels, 1, silu=True)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, channels, H, W)."""
        skipped, x = self.cv1(x).chunk(2, dim=1)
        first = self.cv2(x, padding_mask)
        return self.cv4(torch.cat([skipped, x, first, self.cv3(first, padding_mask)], dim=1))
