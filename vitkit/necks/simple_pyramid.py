"""ViTDet's pyramid, made from a single map."""

import math
from collections.abc import Mapping, Sequence

from timm.layers import LayerNorm2d
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.detection import check_features
from vitkit.nn.padding import zero_padding
from vitkit.registry import NECKS, Spec
from vitkit.structures import FeatureInfo


def pyramid_override(feature_info: Mapping[str, FeatureInfo], neck: str, **arguments: object) -> str:
    """Return the config overrides (for a command line) that put a pyramid from a single map in front of a neck.

    Args:
        feature_info: description of the backbone's maps.
        neck: the neck's registered name.
        arguments: arguments of the neck.
    """
    parts = [f"type={neck!r}", *(f"{name}={value!r}" for name, value in arguments.items())]
    pyramid = f"\"model.neck=dict(type='SimpleFeaturePyramid', neck=dict({', '.join(parts)}))\""
    *_, (_, stride) = feature_info.values()
    return pyramid if _is_power_of_2(stride) else f"{pyramid} model.backbone.patch_size=16"


def _is_power_of_2(stride: int) -> bool:
    return stride > 0 and stride & (stride - 1) == 0


class ConvLayerNorm(nn.Conv2d):
    """Convolution without bias, then a layer norm over the channels."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = LayerNorm2d(out_channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve and normalize: (B, in_channels, H, W) -> (B, out_channels, H, W)."""
        return self.norm(super().forward(x))


@NECKS.register
class SimpleFeaturePyramid(nn.Module):
    """Maps "res2" to "res5" (res{log2 stride}), each made from the same map, for a plain ViT with heads that read
    several levels (Li et al. 2022, section 3, https://arxiv.org/abs/2203.16527).

    Finer maps are made by transposed convolutions, coarser ones by max pooling; a 1x1 and a 3x3 convolution follow,
    each with a layer norm.

    Args:
        feature_info: description of the backbone's maps.
        out_channels: channels of each map.
        in_feature: name of the map to start from, whose stride must be a power of 2; None: the coarsest.
        strides: strides of the maps, powers of 2.
        neck: spec or module of a neck that reads these maps, such as a pixel decoder; None: they are returned as they
            are.
        isolate_padding: whether padding is kept from affecting an image; the model sets it.
    Raises:
        ConfigError: the backbone has no map of that name, or a stride does not fit.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int = 256,
        *,
        in_feature: str | None = None,
        strides: Sequence[int] = (4, 8, 16, 32),
        neck: Spec | nn.Module | None = None,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        self.in_feature = list(feature_info)[-1] if in_feature is None else in_feature
        self.in_features = [self.in_feature]
        check_features("SimpleFeaturePyramid", self.in_features, feature_info)
        channels, stride = feature_info[self.in_feature]
        strides = sorted(set(strides))
        for value, whose in ((stride, f"the map {self.in_feature!r}"), *((s, "a level") for s in strides)):
            if not _is_power_of_2(value):
                raise ConfigError(
                    f"SimpleFeaturePyramid: stride {value} of {whose}: expected a power of 2. For timm's "
                    "plain ViTs with other patch sizes set model.backbone.patch_size=16."
                )
        if not strides:
            raise ConfigError("SimpleFeaturePyramid: strides is empty; expected powers of 2, such as (4, 8, 16, 32).")
        factor = stride // strides[0]
        if channels % max(factor, 1):
            raise ConfigError(
                f"SimpleFeaturePyramid: the map's {channels} channels cannot be halved down to stride {strides[0]}: "
                f"expected a multiple of {factor}, or coarser strides."
            )
        levels = {f"res{int(math.log2(s))}": FeatureInfo(out_channels, s) for s in strides}
        self.levels = nn.ModuleDict(
            {
                name: nn.Sequential(*_rescale(channels, stride, info.stride, out_channels))
                for name, info in levels.items()
            }
        )
        self.neck = None
        if neck is not None:
            isolated = {"isolate_padding": True} if isolate_padding else {}
            self.neck = NECKS.build(neck, feature_info=levels, **isolated)
        self.feature_info = levels if neck is None else self.neck.feature_info

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Return the pyramid, or the outputs of `neck` for it.

        Args:
            features: name -> (B, channels, h, w).
            padding_mask: (B, H, W) bool, True = padding; with `isolate_padding` it is zeroed before kernels that
                extend beyond an image's border.
        Returns:
            name -> (B, out_channels, ceil(h * s), ceil(w * s)) with s = stride of the map / stride of the level; or the
            outputs of `neck` for these.
        """
        isolated = padding_mask if self.isolate_padding else None
        x = zero_padding(features[self.in_feature], isolated)
        maps = {}
        for name, level in self.levels.items():
            *before, last = level
            y = x
            for layer in before:
                y = layer(y)
            maps[name] = last(zero_padding(y, isolated))
        return maps if self.neck is None else self.neck(maps, padding_mask)


def _rescale(channels: int, stride: int, new_stride: int, out_channels: int) -> list[nn.Module]:
    """Return the layers from a map of `stride` to one of `new_stride`; doubling the size halves the channels."""
    layers: list[nn.Module] = []
    while stride > new_stride:
        if layers:
            layers += [LayerNorm2d(channels, eps=1e-6), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels, stride = channels // 2, stride // 2
    if stride < new_stride:
        # If the map's size is odd, the last row or column is pooled by itself.
        layers += [
            nn.MaxPool2d(kernel_size=2, stride=2, ceil_mode=True) for _ in range(int(math.log2(new_stride // stride)))
        ]
    return [
        *layers,
        ConvLayerNorm(channels, out_channels, kernel_size=1),
        ConvLayerNorm(out_channels, out_channels, kernel_size=3),
    ]
