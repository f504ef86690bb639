"""The neck of LW-DETR (Chen et al. 2024, https://arxiv.org/abs/2406.03459) and RF-DETR: several maps of a plain
transformer become one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.detection import check_features
from vitkit.nn.padding import zero_padding
from vitkit.ops.keypoints import KEYPOINT_MAP
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class ConvLayerNormSiLU(nn.Module):
    """Convolution without bias, layer norm over the channels, and SiLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = LayerNorm2d(out_channels, eps=1e-6)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H, W)."""
        return F.silu(self.norm(self.conv(x if self.conv.kernel_size == (1, 1) else zero_padding(x, padding_mask))))


@NECKS.register
class C2fProjection(nn.Module):
    """Concatenates maps of one stride, and fuses them in a C2f block: half of a projection passes through a chain of
    convolutions, and all intermediate results are projected together.

    Args:
        feature_info: description of the backbone's maps.
        out_channels: channels of the result, an even number.
        in_features: names of the maps to use; None: all.
        num_blocks: number of pairs of 3x3 convolutions in the chain.
        isolate_padding: whether padding is kept from affecting convolutions; the model sets it.
    Raises:
        ConfigError: the backbone has no map of a name, the maps have different strides, or `out_channels` is odd.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        in_features: Sequence[str] | None = None,
        num_blocks: int = 3,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        check_features("C2fProjection", in_features or (), feature_info)
        self.in_features = [name for name in feature_info if in_features is None or name in in_features]
        infos = [feature_info[name] for name in self.in_features]
        strides = {info.stride for info in infos}
        if len(strides) != 1:
            raise ConfigError(
                f"C2fProjection: the maps {', '.join(self.in_features) or '(none)'} have strides "
                f"{', '.join(str(info.stride) for info in infos) or '(none)'}; expected maps of one stride. Set "
                "model.neck.in_features, or choose a backbone with several such maps (model.backbone.type=WindowedViT)."
            )
        if out_channels < 2 or out_channels % 2:
            raise ConfigError(f"C2fProjection: out_channels={out_channels}: expected an even number.")
        (stride,) = strides
        self.feature_info = {f"res{round(math.log2(stride))}": FeatureInfo(out_channels, stride)}
        hidden = out_channels // 2
        self.conv1 = ConvLayerNormSiLU(sum(info.channels for info in infos), 2 * hidden, 1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(ConvLayerNormSiLU(hidden, hidden, 3) for _ in range(2)) for _ in range(num_blocks)
        )
        self.conv2 = ConvLayerNormSiLU((2 + num_blocks) * hidden, out_channels, 1)
        self.norm = LayerNorm2d(out_channels, eps=1e-6)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the only map.

        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H', W') bool at the size of the images, True = padding.
        Returns:
            name -> (B, out_channels, H, W).
        """
        padding_mask = padding_mask if self.isolate_padding else None
        parts = list(self.conv1(torch.cat([features[name] for name in self.in_features], dim=1)).chunk(2, dim=1))
        for conv1, conv2 in self.blocks:
            parts.append(conv2(conv1(parts[-1], padding_mask), padding_mask))
        x = self.norm(self.conv2(torch.cat(parts, dim=1)))
        return {next(iter(self.feature_info)): x}


@NECKS.register
class C2fProjectionPair(C2fProjection):
    """Two projections of the same maps: one for boxes, and a second one for keypoints, the map "keypoints" (RF-DETR).

    The arguments are those of `C2fProjection`.
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], out_channels: int, **options: Any):
        super().__init__(feature_info, out_channels, **options)
        self.keypoints = C2fProjection(feature_info, out_channels, **options)
        (info,) = self.feature_info.values()
        self.feature_info = self.feature_info | {KEYPOINT_MAP: info}

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return both maps; arguments as for `C2fProjection`."""
        (x,) = self.keypoints(features, padding_mask).values()
        return super().forward(features, padding_mask) | {KEYPOINT_MAP: x}
