"""The encoder of DEIMv2's smallest models (Huang et al. 2025, https://arxiv.org/abs/2509.20787): two maps from one,
without attention."""

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.deimv2_encoder import FusionBlock, fusion_block
from vitkit.nn.detection import check_features
from vitkit.nn.padding import zero_padding
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.ops.images import resize_mask
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class PooledDown(nn.Module):
    """Halves a map: the means of 3x3 locations, and a 1x1 convolution."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = ConvNorm(channels, channels, 1, silu=True)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, channels, H, W) -> (B, channels, ceil(H / 2), ceil(W / 2))."""
        return self.conv(F.avg_pool2d(zero_padding(x, padding_mask), 3, stride=2, padding=1))


@NECKS.register
class LiteEncoder(nn.Module):
    """Adds a map of half the resolution to a map, and fuses both by sums, top-down and bottom-up.

    The coarser map is the one that the image's mean is added to.

    Args:
        feature_info: description of the backbone's maps.
        out_channels: channels of each output.
        in_features: the name of the map to use, in a list; None: the backbone's coarsest.
        block, num_blocks, expansion: see `DEIMv2Encoder`.
        isolate_padding: whether padding is kept from affecting the image; False: it is treated like the image, as in
            the original. The model sets it.
    Raises:
        ConfigError: the backbone has no map of that name, more than one is named, or see `DEIMv2Encoder`.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        in_features: list[str] | None = None,
        block: FusionBlock = "dfine",
        num_blocks: int = 2,
        expansion: float = 0.34,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.in_features = list(feature_info)[-1:] if in_features is None else list(in_features)
        if len(self.in_features) != 1:
            raise ConfigError(f"LiteEncoder: in_features={self.in_features}: expected the name of one map.")
        (name,) = self.in_features
        check_features("LiteEncoder", [name], feature_info)
        stride = feature_info[name].stride
        self.isolate_padding = isolate_padding
        self.feature_info = {
            name: FeatureInfo(out_channels, stride),
            f"res{round(math.log2(2 * stride))}": FeatureInfo(out_channels, 2 * stride),
        }
        self.input_proj = nn.ModuleList([ConvNorm(feature_info[name].channels, out_channels, 1, silu=False)])
        self.extra_level = PooledDown(out_channels)
        self.global_conv = ConvNorm(out_channels, out_channels, 1, silu=True)

        def fuse() -> nn.Module:
            return fusion_block("LiteEncoder", block, out_channels, num_blocks=num_blocks, expansion=expansion)

        self.fpn_block = fuse()
        self.downsample = PooledDown(out_channels)
        self.pan_block = fuse()

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Encode the map.

        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H', W') bool at the size of the images, True = padding.
        Returns:
            name -> (B, out_channels, H, W) and (B, out_channels, ceil(H / 2), ceil(W / 2)).
        """
        isolated = padding_mask if self.isolate_padding else None
        fine = self.input_proj[0](features[self.in_features[0]])
        coarse = self.extra_level(fine, isolated)
        coarse = self.global_conv(coarse + global_mean(coarse, isolated))
        upsampled = F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        fine = self.fpn_block(fine + upsampled, isolated)
        coarse = self.pan_block(coarse + self.downsample(fine, isolated), isolated)
        return dict(zip(self.feature_info, (fine, coarse)))


def global_mean(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return the mean of a map's locations that are not padding: (B, C, H, W) -> (B, C, 1, 1)."""
    if padding_mask is None:
        return F.adaptive_avg_pool2d(x, 1)
    inside = ~resize_mask(padding_mask, x.shape[-2:])[:, None]
    return x.where(inside, 0).sum((2, 3), keepdim=True) / inside.sum((2, 3), keepdim=True).clamp(min=1)
