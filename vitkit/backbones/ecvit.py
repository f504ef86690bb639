"""ECViT, EdgeCrafter's small vision transformer (https://arxiv.org/abs/2603.18739): patches by convolutions, and maps
of three strides from one."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.vit import ClassifierOptions, ViT
from vitkit.errors import ConfigError
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.ops.images import check_images, pad_to_multiple
from vitkit.registry import BACKBONES
from vitkit.structures import FeatureInfo

_STRIDES = {"res3": 8, "res4": 16, "res5": 32}


class ConvPatchEmbedding(nn.Module):
    """Patches of 16 pixels by four 3x3 convolutions, each at half of the previous resolution; the last one is the
    projection, without norm and activation."""

    patch_size = 16

    def __init__(self, d_model: int, in_channels: int = 3):
        super().__init__()
        widths = (in_channels, d_model // 8, d_model // 4, d_model // 2)
        self.convs = nn.ModuleList(ConvNorm(a, b, 3, stride=2, silu=False) for a, b in pairwise(widths))
        self.proj = nn.Conv2d(widths[-1], d_model, 3, stride=2, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, d_model, ceil(H / 16), ceil(W / 16))."""
        for conv in self.convs:
            images = F.relu(conv(images))
        return self.proj(images)


@BACKBONES.register
class ECViT(ViT):
    """A small vision transformer with a convolutional patch embedding, one register token, rotary positions and no last
    norm. The mean of the patches after its last two blocks, resized, makes the maps at strides 8, 16 and 32.

    Images are padded at the right and bottom to a multiple of 32.

    Args:
        d_model, depth, num_heads, mlp_ratio: see `ViT`.
        out_channels: channels of each map, to which each has its own projection; None: the maps keep `d_model`
            channels, and only that of stride 32 has a projection.
        classifier: see `ClassifierOptions`; it reads the mean of the patches.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`.
    Raises:
        ConfigError: there are fewer than two blocks or eight channels; and see `ViT`.
    """

    input_weight = "patch_embed.convs.0.0.weight"
    classifier_parts = ("norm.", "fc_norm.")
    optional_weights = ("projections.*",)

    def __init__(
        self,
        d_model: int = 192,
        *,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        out_channels: int | None = None,
        classifier: ClassifierOptions | None = None,
        drop_path: float = 0.0,
        **options: Any,
    ):
        if depth < 2 or d_model < 8:
            raise ConfigError(f"depth={depth}, d_model={d_model}: expected at least 2 blocks and 8 channels.")
        if out_channels is not None and out_channels < 1:
            raise ConfigError(f"out_channels={out_channels}: expected at least 1, or None for d_model={d_model}.")
        super().__init__(
            16,
            d_model,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            positions="rotary",
            class_token=False,
            num_registers=1,
            classifier=dict(pooling="mean") | dict(classifier or {}),
            drop_path=drop_path,
            **options,
        )
        self.patch_embed = ConvPatchEmbedding(d_model, self.in_channels)
        if not self.is_classifier:
            channels = out_channels or d_model
            self.feature_info = {name: FeatureInfo(channels, info.stride) for name, info in self.feature_info.items()}
            projected = ["res5"] if out_channels is None else list(_STRIDES)
            self.projections = nn.ModuleDict(
                {name: ConvNorm(d_model, channels, 1, silu=False) for name in projected if name in self.feature_info}
            )
            del self.norm
        self.freeze()

    @staticmethod
    def maps(patch_size: int, d_model: int, depth: int) -> dict[str, FeatureInfo]:
        """Return the description of all maps, before their projections."""
        return {name: FeatureInfo(d_model, stride) for name, stride in _STRIDES.items()}

    def keep_features(self, names: Iterable[str]) -> None:
        super().keep_features(names)
        for name in self.projections.keys() - self.feature_info.keys():
            del self.projections[name]

    def drop_stages_after(self, feature: str) -> None:
        """Do nothing: each map needs all blocks."""

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the maps, or a classifier's logits, of images of any size."""
        check_images("ECViT", images, in_channels=self.in_channels)
        if self.is_classifier:
            return super().forward(images)
        height, width = images.shape[-2:]
        images, _ = pad_to_multiple(images, None, max(_STRIDES.values()))
        depth = len(self.blocks)
        patches = torch.stack(self.block_maps(images, [depth - 2, depth - 1], norm=False)).mean(0)
        maps = {}
        for name, info in self.feature_info.items():
            size = images.shape[-2] // info.stride, images.shape[-1] // info.stride
            resized = info.stride != self.patch_size
            x = F.interpolate(patches, size=size, mode="bilinear", align_corners=False) if resized else patches
            x = self.projections[name](x) if name in self.projections else x
            maps[name] = x[..., : (height + info.stride - 1) // info.stride, : (width + info.stride - 1) // info.stride]
        return maps
