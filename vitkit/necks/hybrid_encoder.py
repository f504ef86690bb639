"""RT-DETR's hybrid encoder (Zhao et al. 2023, section 4.2, https://arxiv.org/abs/2304.08069)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.padding import zero_padding
from vitkit.nn.position import sine_positions_grid
from vitkit.nn.transformer import TransformerEncoderLayer
from vitkit.ops.images import resize_mask
from vitkit.registry import NECKS, nearest
from vitkit.structures import FeatureInfo


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
        return super().forward(zero_padding(x, padding_mask) if self[0].kernel_size != (1, 1) else x)


class RepBlock(nn.Module):
    """RepVGG's block: the sum of a 3x3 and a 1x1 convolution (Ding et al. 2021, https://arxiv.org/abs/2101.03697)."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, silu=False)
        self.conv2 = ConvNorm(channels, channels, 1, silu=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, channels, H, W) -> the same."""
        return F.silu(self.conv1(x, padding_mask) + self.conv2(x))


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


@NECKS.register
class HybridEncoder(nn.Module):
    """Self-attention within the coarsest map, then fusion of all maps, top-down and bottom-up.

    Args:
        feature_info: description of the backbone's maps, fine to coarse.
        out_channels: channels of each output.
        in_features: names of the maps to use, fine to coarse, each of half the stride of the next; None: all.
        num_heads, d_ffn, dropout: of the layer of self-attention, see `vitkit.nn.transformer`.
        num_blocks, expansion: of the fusion blocks, see `CSPRepLayer`.
        isolate_padding: whether padding is kept from affecting convolutions; False: it is treated like the image, as
            in the original. The self-attention never sees padding. The model sets it.
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
        super().__init__()
        self.in_features = list(feature_info) if in_features is None else list(in_features)
        for name in self.in_features:
            if name not in feature_info:
                raise ConfigError(
                    f"{type(self).__name__}: the backbone has no feature {name!r}. {nearest(name, feature_info)}"
                )
        infos = [feature_info[name] for name in self.in_features]
        strides = [info.stride for info in infos]
        if not strides or strides != [strides[0] * 2**i for i in range(len(strides))]:
            raise ConfigError(
                f"{type(self).__name__}: in_features {', '.join(self.in_features)} have strides "
                f"{', '.join(map(str, strides))}; expected each to be twice the previous one."
            )
        self.isolate_padding = isolate_padding
        self.feature_info = {name: FeatureInfo(out_channels, feature_info[name].stride) for name in self.in_features}
        self.input_proj = nn.ModuleList(ConvNorm(info.channels, out_channels, 1, silu=False) for info in infos)
        self.encoder = TransformerEncoderLayer(
            out_channels, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, activation="gelu"
        )
        steps = range(len(infos) - 1)
        fusion = dict(num_blocks=num_blocks, expansion=expansion)
        self.lateral_convs = nn.ModuleList(ConvNorm(out_channels, out_channels, 1, silu=True) for _ in steps)
        self.fpn_blocks = nn.ModuleList(CSPRepLayer(2 * out_channels, out_channels, **fusion) for _ in steps)
        self.downsample_convs = nn.ModuleList(
            ConvNorm(out_channels, out_channels, 3, stride=2, silu=True) for _ in steps
        )
        self.pan_blocks = nn.ModuleList(CSPRepLayer(2 * out_channels, out_channels, **fusion) for _ in steps)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Encode the maps.

        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
        Returns:
            name -> (B, out_channels, H, W), fine to coarse.
        """
        isolated = padding_mask if self.isolate_padding else None
        maps = [project(features[name]) for project, name in zip(self.input_proj, self.in_features)]
        maps[-1] = self._attend(maps[-1], padding_mask)
        # Top-down: each coarser map, doubled in size, joins the next finer one.
        for i, (lateral, fuse) in enumerate(zip(self.lateral_convs, self.fpn_blocks)):
            coarse, fine = len(maps) - 1 - i, len(maps) - 2 - i
            maps[coarse] = lateral(maps[coarse])
            upsampled = F.interpolate(maps[coarse], size=maps[fine].shape[-2:], mode="nearest")
            maps[fine] = fuse(torch.cat([upsampled, maps[fine]], dim=1), isolated)
        # Bottom-up.
        for i, (downsample, fuse) in enumerate(zip(self.downsample_convs, self.pan_blocks)):
            maps[i + 1] = fuse(torch.cat([downsample(maps[i], isolated), maps[i + 1]], dim=1), isolated)
        return dict(zip(self.in_features, maps))

    def _attend(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Apply self-attention to the locations of a map, (B, C, H, W)."""
        size = x.shape[-2:]
        positions = sine_positions_grid(tuple(size), x.shape[1], device=x.device).to(x.dtype)
        bias = None if padding_mask is None else padding_bias(resize_mask(padding_mask, size).flatten(1), x.dtype)
        tokens = self.encoder(x.flatten(2).transpose(1, 2), positions[None], bias=bias)
        return tokens.transpose(1, 2).unflatten(2, size)
