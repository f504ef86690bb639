"""Pixel decoders: a map for masks at the finest stride, and maps for the queries to attend to."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from vitkit.errors import ConfigError
from vitkit.nn.attention import padding_bias
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.deformable_transformer import DeformableEncoder, flatten_levels
from vitkit.nn.position import sine_positions_2d
from vitkit.nn.transformer import TransformerEncoder
from vitkit.ops.images import resize_mask
from vitkit.registry import NECKS
from vitkit.structures import FeatureInfo

MASK_FEATURES = "mask_features"
"""The name of the map whose product with a query's embedding is its mask."""


def conv_norm(in_channels: int, out_channels: int, kernel_size: int, *, relu: bool) -> nn.Sequential:
    """Convolution without bias, group norm of 32 groups, ReLU if wanted."""
    layer = Conv2dNormActivation(
        in_channels,
        out_channels,
        kernel_size,
        norm_layer=partial(nn.GroupNorm, 32),
        activation_layer=nn.ReLU if relu else None,
    )
    nn.init.kaiming_uniform_(layer[0].weight, a=1)
    return layer


class TopDownPath(nn.Module):
    """A feature pyramid (Lin et al. 2017, https://arxiv.org/abs/1612.03144): coarse maps are added to finer ones.

    Args:
        feature_info: of the maps to add to, fine to coarse.
        mode: how a coarse map is enlarged, "nearest" or "bilinear".
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], channels: int, *, mode: str):
        super().__init__()
        self.mode = mode
        self.lateral = nn.ModuleDict(
            {name: conv_norm(info.channels, channels, 1, relu=False) for name, info in feature_info.items()}
        )
        self.output = nn.ModuleDict({name: conv_norm(channels, channels, 3, relu=True) for name in feature_info})

    def forward(self, features: Mapping[str, Tensor], coarse: Tensor) -> Tensor:
        """`coarse` (B, channels, h, w) carried down to the finest of the features."""
        options = {} if self.mode == "nearest" else dict(align_corners=False)
        for name in reversed(list(self.lateral)):
            # At the finest stride these are the largest tensors of all: summed in place, and none kept for the layers
            # after the one that reads it.
            x = self.lateral[name](features[name])
            x += F.interpolate(coarse, size=x.shape[-2:], mode=self.mode, **options)
            for layer in self.output[name]:
                x = layer(x)
            coarse = x
        return coarse


@NECKS.register
class FPNPixelDecoder(nn.Module):
    """MaskFormer's pyramid (Cheng et al. 2021, https://arxiv.org/abs/2107.06278).

    Args:
        feature_info: of the backbone's maps, fine to coarse.
        out_channels: of the pyramid.
        mask_channels: of the map for masks.
    Returns of `forward`: "mask_features" at the finest stride, and the backbone's coarsest map for the queries.
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], out_channels: int, *, mask_channels: int = 256):
        super().__init__()
        *finer, self.coarsest = feature_info
        self.top = conv_norm(feature_info[self.coarsest].channels, out_channels, 3, relu=True)
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="nearest")
        self.mask_features = mask_projection(out_channels, mask_channels, kernel_size=3)
        finest = next(iter(feature_info.values()))
        self.feature_info = {
            MASK_FEATURES: FeatureInfo(mask_channels, finest.stride),
            self.coarsest: feature_info[self.coarsest],
        }

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """name -> (B, channels, H, W); padding counts like any other place."""
        coarsest = features[self.coarsest]
        finest = self.path(features, self.top(coarsest))
        return {MASK_FEATURES: self.mask_features(finest), self.coarsest: coarsest}


@NECKS.register
class TransformerPixelDecoder(nn.Module):
    """MaskFormer's pyramid over a transformer encoder on the coarsest map, as its COCO models have it.

    Args:
        feature_info, out_channels, mask_channels: see `FPNPixelDecoder`.
        num_heads, d_ffn, dropout, num_layers: of the encoder.
    Returns of `forward`: as `FPNPixelDecoder`, but the coarsest map is the encoder's.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        out_channels: int,
        *,
        mask_channels: int = 256,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        num_layers: int = 6,
    ):
        super().__init__()
        *finer, self.coarsest = feature_info
        info = feature_info[self.coarsest]
        self.input_proj = nn.Conv2d(info.channels, out_channels, kernel_size=1)
        nn.init.kaiming_uniform_(self.input_proj.weight, a=1)
        nn.init.zeros_(self.input_proj.bias)
        self.encoder = TransformerEncoder(num_layers, out_channels, num_heads=num_heads, d_ffn=d_ffn, dropout=dropout)
        for matrix in self.encoder.parameters():
            if matrix.dim() > 1:
                nn.init.xavier_uniform_(matrix)
        self.top = conv_norm(out_channels, out_channels, 3, relu=True)
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="nearest")
        self.mask_features = mask_projection(out_channels, mask_channels, kernel_size=3)
        finest = next(iter(feature_info.values()))
        self.feature_info = {
            MASK_FEATURES: FeatureInfo(mask_channels, finest.stride),
            self.coarsest: FeatureInfo(out_channels, info.stride),
        }

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """
        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H, W) bool of the images, True = padding, which is then not attended to.
        """
        x = self.input_proj(features[self.coarsest])
        size = x.shape[-2:]
        mask = None if padding_mask is None else resize_mask(padding_mask, size)
        bias = None if mask is None else padding_bias(mask.flatten(1), x.dtype)
        positions = sine_positions_2d(size, x.shape[1], padding_mask=mask, device=x.device).flatten(1, 2).to(x.dtype)
        x = self.encoder(x.flatten(2).transpose(1, 2), positions, bias=bias).transpose(1, 2).unflatten(2, size)
        finest = self.path(features, self.top(x))
        return {MASK_FEATURES: self.mask_features(finest), self.coarsest: x}


@NECKS.register
class DeformablePixelDecoder(nn.Module):
    """Mask2Former's (Cheng et al. 2022, https://arxiv.org/abs/2112.01527): deformable attention over the coarse maps,
    one pyramid step to the finest.

    Under autocast it computes in the lower precision, where the original keeps to float32; sampling places stay so.

    Args:
        feature_info: of the backbone's maps, fine to coarse; the last `num_levels` are attended to.
        out_channels: of the encoder and the pyramid.
        mask_channels: of the map for masks.
        num_heads, num_points, d_ffn, dropout, num_layers: of the encoder.
    Returns of `forward`: "mask_features" at the finest stride, then the encoder's maps, fine to coarse.
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
        num_heads: int = 8,
        num_points: int = 4,
        d_ffn: int = 1024,
        dropout: float = 0.0,
        num_layers: int = 6,
    ):
        super().__init__()
        names = list(feature_info)
        if not 1 <= num_levels < len(names):
            raise ConfigError(
                f"DeformablePixelDecoder: num_levels={num_levels} needs that many coarse maps and a finer one, but the "
                f"backbone gives {len(names)} ({', '.join(names)}). Set model.neck.num_levels or "
                "model.backbone.out_features; of a backbone with one map make several: "
                "model.neck=dict(type='SimpleFeaturePyramid', neck=dict(type='DeformablePixelDecoder', ...))."
            )
        # Coarse to fine, as the original numbers its levels.
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
        self.encoder = DeformableEncoder(
            num_layers, out_channels, num_heads=num_heads, num_levels=num_levels, num_points=num_points, d_ffn=d_ffn,
            dropout=dropout,
        )  # fmt: skip
        self._initialize_encoder()
        finer = names[: len(names) - num_levels]
        self.path = TopDownPath({name: feature_info[name] for name in finer}, out_channels, mode="bilinear")
        self.mask_features = mask_projection(out_channels, mask_channels, kernel_size=1)
        self.feature_info = {MASK_FEATURES: FeatureInfo(mask_channels, feature_info[names[0]].stride)} | {
            name: FeatureInfo(out_channels, feature_info[name].stride) for name in reversed(self.levels)
        }

    def _initialize_encoder(self) -> None:
        nn.init.normal_(self.level_embed)
        for matrix in self.encoder.parameters():
            if matrix.dim() > 1:
                nn.init.xavier_uniform_(matrix)
        for module in self.encoder.modules():
            if isinstance(module, MultiScaleDeformableAttention):
                module.reset_parameters()

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Tensor]:
        """
        Args:
            features: name -> (B, channels, H, W).
            padding_mask: (B, H, W) bool of the images, True = padding, which then reads as 0.
        """
        maps = {name: project(features[name]) for name, project in zip(self.levels, self.input_proj)}
        levels = flatten_levels(maps, padding_mask, position_offset=0.0)
        codes = torch.cat([e.expand(n, -1) for e, n in zip(self.level_embed, levels.sizes)])
        memory = self.encoder(levels, levels.positions + codes)
        encoded = {
            name: x.transpose(1, 2).unflatten(2, shape)
            for name, x, shape in zip(self.levels, memory.split(levels.sizes, dim=1), levels.shapes)
        }
        finest = self.path(features, encoded[self.levels[-1]])
        return {MASK_FEATURES: self.mask_features(finest)} | {name: encoded[name] for name in reversed(self.levels)}


def mask_projection(in_channels: int, out_channels: int, *, kernel_size: int) -> nn.Conv2d:
    projection = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2)
    nn.init.kaiming_uniform_(projection.weight, a=1)
    nn.init.zeros_(projection.bias)
    return projection
