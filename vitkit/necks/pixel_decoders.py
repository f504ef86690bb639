"""Pixel decoders: mask features at the finest stride, and maps for the queries to attend to.

With `isolate_padding`, padding does not affect an image; without, it is treated like the image, as in the originals.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.necks.simple_pyramid import pyramid_override
from vitkit.nn.attention import padding_bias
from vitkit.nn.deformable_transformer import DeformableEncoder, flatten_levels, init_deformable
from vitkit.nn.layers import init_xavier
from vitkit.nn.mask_features import MASK_FEATURES, ConvGroupNorm
from vitkit.nn.padding import extend_edges, group_norm, zero_padding
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo


class MaskProjection(nn.Conv2d):
    """The convolution to the mask features; it extends an image's edges into the padding for bilinear resizing."""

    def __init__(self, in_channels: int, out_channels: int, *, kernel_size: int):
        super().__init__(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
        nn.init.kaiming_uniform_(self.weight, a=1)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H, W)."""
        return extend_edges(super().forward(zero_padding(x, padding_mask)), padding_mask)


class TopDownPath(nn.Module):
    """A feature pyramid (Lin et al. 2017, https://arxiv.org/abs/1612.03144): coarse maps are added to finer ones.

    Args:
        feature_info: description of the maps to add to, fine to coarse.
        mode: how a coarse map is upsampled, "nearest" or "bilinear".
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], channels: int, *, mode: str):
        super().__init__()
        self.mode = mode
        self.lateral = nn.ModuleDict(
            {name: ConvGroupNorm(info.channels, channels, 1, relu=False) for name, info in feature_info.items()}
        )
        self.output = nn.ModuleDict({name: ConvGroupNorm(channels, channels, 3, relu=True) for name in feature_info})

    def forward(self, features: Mapping[str, Tensor], coarse: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Propagate `coarse` (B, channels, h, w) down to the finest of the features."""
        options = {} if self.mode == "nearest" else dict(align_corners=False)
        for name in reversed(list(self.lateral.keys())):  # torch 2.6 cannot compile iterating over the list of modules
            if self.mode == "bilinear":
                coarse = extend_edges(coarse, padding_mask)
            # At the finest stride these are the largest tensors of all, so they are added in place, and none is kept
            # after the layer that reads it.
            x = self.lateral[name](features[name], padding_mask)
            x += F.interpolate(coarse, size=x.shape[-2:], mode=self.mode, **options)
            convolution, norm, relu = self.output[name]
            x = convolution(zero_padding(x, padding_mask))
            x = group_norm(x, padding_mask, norm)
            coarse = relu(x)
        return coarse


@NECKS.register
class FPNPixelDecoder(nn.Module):
    """MaskFormer's pyramid (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        feature_info: description of the backbone's maps, fine to coarse.
        out_channels: channels of the pyramid.
        mask_channels: channels of the mask features.
        isolate_padding: whether padding is kept from affecting an image; the model sets it.
    `forward` returns "mask_features" at the finest stride, and the backbone's coarsest map for the queries.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        mask_channels: int = 256,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        *finer, self.coarsest = feature_info
        self.top = ConvGroupNorm(feature_info[self.coarsest].channels, out_channels, 3, relu=True)
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="nearest")
        self.mask_features = MaskProjection(out_channels, mask_channels, kernel_size=3)
        finest = next(iter(feature_info.values()))
        self.feature_info = {
            MASK_FEATURES: FeatureInfo(mask_channels, finest.stride),
            self.coarsest: feature_info[self.coarsest],
        }

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """name -> (B, channels, H, W)."""
        padding_mask = padding_mask if self.isolate_padding else None
        coarsest = features[self.coarsest]
        finest = self.path(features, self.top(coarsest, padding_mask), padding_mask)
        return {MASK_FEATURES: self.mask_features(finest, padding_mask), self.coarsest: coarsest}


@NECKS.register
class TransformerPixelDecoder(nn.Module):
    """MaskFormer's pyramid over a transformer encoder on the coarsest map, as in its COCO models.

    Args:
        feature_info, out_channels, mask_channels, isolate_padding: see `FPNPixelDecoder`.
        num_layers: number of layers of the encoder.
        num_heads, d_ffn, dropout, norm_first, activation: of its layers, see `vitkit.nn.transformer`.
    `forward` returns the same as `FPNPixelDecoder`, but the coarsest map is the encoder's.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        mask_channels: int = 256,
        num_layers: int = 6,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        norm_first: bool = False,
        activation: Literal["relu", "gelu", "silu"] = "relu",
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        *finer, self.coarsest = feature_info
        info = feature_info[self.coarsest]
        self.input_proj = nn.Conv2d(info.channels, out_channels, kernel_size=1)
        nn.init.kaiming_uniform_(self.input_proj.weight, a=1)
        nn.init.zeros_(self.input_proj.bias)
        layer = dict(num_heads=num_heads, d_ffn=d_ffn, dropout=dropout, norm_first=norm_first, activation=activation)
        self.encoder = TransformerEncoder(num_layers, out_channels, **layer)
        init_xavier(self.encoder)
        self.top = ConvGroupNorm(out_channels, out_channels, 3, relu=True)
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="nearest")
        self.mask_features = MaskProjection(out_channels, mask_channels, kernel_size=3)
        finest = next(iter(feature_info.values()))
        self.feature_info = {
            MASK_FEATURES: FeatureInfo(mask_channels, finest.stride),
            self.coarsest: FeatureInfo(out_channels, info.stride),
        }

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """name -> (B, channels, H, W)."""
        padding_mask = padding_mask if self.isolate_padding else None
        x = self.input_proj(features[self.coarsest])
        size = x.shape[-2:]
        mask = None if padding_mask is None else resize_mask(padding_mask, size)
        bias = None if mask is None else padding_bias(mask.flatten(1), x.dtype)
        positions = sine_positions_2d(size, x.shape[1], padding_mask=mask, device=x.device).flatten(1, 2).to(x.dtype)
        x = self.encoder(x.flatten(2).transpose(1, 2), positions, bias=bias).transpose(1, 2).unflatten(2, size)
        finest = self.path(features, self.top(x, padding_mask), padding_mask)
        return {MASK_FEATURES: self.mask_features(finest, padding_mask), self.coarsest: x}


@NECKS.register
class DeformablePixelDecoder(nn.Module):
    """Mask2Former's pixel decoder (Cheng et al. 2022, https://arxiv.org/abs/2112.01527): deformable attention over the
    coarse maps, then one pyramid step to the finest.

    Under autocast it computes in the lower precision, where the original stays in float32; sampling locations are
    kept in float32.

    Args:
        feature_info: description of the backbone's maps, fine to coarse; the last `num_levels` are attended to.
        out_channels: channels of the encoder and the pyramid.
        mask_channels: channels of the mask features.
        num_layers: number of layers of the encoder.
        num_heads, num_points, d_ffn, dropout: of its layers, see `vitkit.nn.deformable_transformer`.
        isolate_padding: see `FPNPixelDecoder`.
    `forward` returns "mask_features" at the finest stride, then the encoder's maps, fine to coarse.
    Raises:
        ConfigError: the backbone has too few maps.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        mask_channels: int = 256,
        num_levels: int = 3,
        num_layers: int = 6,
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        isolate_padding: bool = False,
    ):
        super().__init__()
        self.isolate_padding = isolate_padding
        layer = dict(num_heads=num_heads, num_points=num_points, d_ffn=d_ffn, dropout=dropout)
        names = list(feature_info)
        if not 1 <= num_levels < len(names):
            arguments = dict(out_channels=out_channels, mask_channels=mask_channels, num_layers=num_layers)
            arguments["num_levels"] = max(1, min(num_levels, 3))  # out of the pyramid's four
            pyramid = pyramid_override(feature_info, "DeformablePixelDecoder", **arguments, **layer)
            raise ConfigError(
                f"DeformablePixelDecoder: num_levels={num_levels} needs that many coarse maps and a finer one, but the "
                f"backbone returns {len(names)} ({', '.join(names)}). Set model.neck.num_levels or "
                f"model.backbone.out_features; for a backbone with one map, make several: {pyramid}"
            )
        # Coarse to fine, in the order of the original's level numbers.
        self.levels = names[: -num_levels - 1 : -1]
        self.input_proj = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(feature_info[name].channels, out_channels, kernel_size=1), nn.GroupNorm(32, out_channels)
            )
            for name in self.levels
        )
        for convolution, _ in self.input_proj:
            nn.init.xavier_uniform_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        self.level_embed = nn.Parameter(torch.empty(num_levels, out_channels))
        self.encoder = DeformableEncoder(num_layers, out_channels, num_levels, **layer)
        nn.init.normal_(self.level_embed)
        init_deformable(self.encoder)
        finer = names[: len(names) - num_levels]
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="bilinear")
        self.mask_features = MaskProjection(out_channels, mask_channels, kernel_size=1)
        self.feature_info = {MASK_FEATURES: FeatureInfo(mask_channels, feature_info[names[0]].stride)} | {
            name: FeatureInfo(out_channels, feature_info[name].stride) for name in reversed(self.levels)
        }

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """name -> (B, channels, H, W)."""
        padding_mask = padding_mask if self.isolate_padding else None
        maps = {
            name: group_norm(convolution(features[name]), padding_mask, norm)
            for name, (convolution, norm) in zip(self.levels, self.input_proj)
        }
        levels = flatten_levels(maps, self.level_embed, padding_mask, position_offset=0.0)
        encoded = levels.split_maps(self.encoder(levels), self.levels)
        finest = self.path(features, encoded[self.levels[-1]], padding_mask)
        masks = {MASK_FEATURES: self.mask_features(finest, padding_mask)}
        return {**masks, **{name: encoded[name] for name in reversed(self.levels)}}
