"""DEIMv2's spatial tuning adapter, STA (Huang et al. 2025, section 3.1, https://arxiv.org/abs/2509.20787)."""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.base import BackboneBase
from vitkit.backbones.vit import ViT
from vitkit.errors import ConfigError
from vitkit.nn.rep_blocks import ConvNorm
from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD, check_images, pad_to_multiple
from vitkit.registry import BACKBONES, Spec
from vitkit.structures import FeatureInfo

_STRIDES = {"res3": 8, "res4": 16, "res5": 32}


class DetailConvolutions(nn.Module):
    """Convolutions of the image, each at half of the previous resolution.

    Args:
        channels: of the first one; the maps at strides 8, 16 and 32 have 2, 4 and 4 times as many.
    """

    def __init__(self, channels: int, in_channels: int = 3):
        super().__init__()
        self.stem = ConvNorm(in_channels, channels, 3, stride=2, silu=False)
        widths = (channels, 2 * channels, 4 * channels, 4 * channels)
        self.levels = nn.ModuleDict(
            {name: ConvNorm(a, b, 3, stride=2, silu=False) for name, a, b in zip(_STRIDES, widths, widths[1:])}
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, in_channels, H, W) -> the map of each level, without an activation."""
        x, maps = F.max_pool2d(F.gelu(self.stem(images)), 3, stride=2, padding=1), {}
        for name, level in self.levels.items():
            maps[name] = level(F.gelu(x) if maps else x)
            x = maps[name]
        return maps


@BACKBONES.register
class SpatialAdapter(BackboneBase):
    """A plain vision transformer with maps at strides 8, 16 and 32: its maps after three blocks are resized, and joined
    by a projection with those of a few convolutions of the image. Loads the transformer's weights. A classifier is the
    transformer alone.

    Images are padded at the right and bottom to a multiple of 32 and of the patch size.

    Args:
        vit: spec of a `ViT`, such as "vit_small_patch14_dinov2" with patch_size=16; its `pretrained` is the adapter's.
        blocks: indices from 0 of the three blocks after which the maps are taken, that of stride 8 first; later blocks
            are left out.
        channels: those of the first convolution, see `DetailConvolutions`.
        out_channels: channels of each map; None: the width of the transformer.
        norm: whether the maps go through the transformer's last norm, which is left out otherwise.
        drop_path: that of the transformer.
        num_classes, in_channels, pixel_mean, pixel_std, options: see `BackboneBase`; `frozen_stages` are the
            transformer's.
    Raises:
        ConfigError: `vit` is not a ViT whose blocks attend globally, or an argument is out of range.
    """

    class_head = ("vit.head.", "vit.head_dist.")
    input_weight = "detail.stem.0.weight"
    optional_weights = ("detail.*", "projections.*")

    def __init__(
        self,
        vit: Spec,
        *,
        blocks: Sequence[int] = (3, 7, 11),
        channels: int = 16,
        out_channels: int | None = None,
        norm: bool = True,
        drop_path: float = 0.0,
        num_classes: int | None = None,
        in_channels: int = 3,
        pixel_mean: Sequence[float] = IMAGENET_MEAN,
        pixel_std: Sequence[float] = IMAGENET_STD,
        **options: Any,
    ):
        spec = dict(type=vit) if isinstance(vit, str) else dict(vit)
        for name in ("pretrained", "frozen_stages", "out_features", "num_classes", "in_channels", "drop_path"):
            if spec.get(name):
                raise ConfigError(f"vit.{name}={spec[name]!r}: an argument of the adapter. Set it there instead.")
        pixels = dict(in_channels=in_channels, pixel_mean=pixel_mean, pixel_std=pixel_std)
        transformer = BACKBONES.build(dict(spec, drop_path=drop_path, num_classes=num_classes, **pixels))
        if not isinstance(transformer, ViT) or not transformer.attends_globally:
            raise ConfigError(
                f"vit: got {type(transformer).__name__}; expected a ViT whose blocks attend over all patches, such as "
                "vit_small_patch16_dinov3."
            )
        depth, width = len(transformer.blocks), len(transformer.patch_embed.proj.weight)
        ascends = all(0 <= a < b < depth for a, b in pairwise(blocks))
        if len(blocks) != len(_STRIDES) or not ascends:
            raise ConfigError(
                f"blocks={list(blocks)}: expected {len(_STRIDES)} ascending indices, 0 to {depth - 1}, for the maps at "
                "strides 8, 16 and 32."
            )
        if channels < 1 or (out_channels is not None and out_channels < 1):
            raise ConfigError(f"channels={channels}, out_channels={out_channels}: expected at least 1.")
        out_channels = out_channels or width
        available = {name: FeatureInfo(out_channels, stride) for name, stride in _STRIDES.items()}
        super().__init__(available, num_classes=num_classes, **pixels, **options)
        self.vit = transformer
        if self.is_classifier:
            self.freeze()
            return
        self.block_indices, self.has_norm = dict(zip(_STRIDES, blocks)), norm
        self.hidden_settings = {"blocks": list(blocks), "norm": norm}
        if not norm:
            del self.vit.norm
        self.multiple = math.lcm(max(_STRIDES.values()), self.vit.patch_size)
        self.detail = DetailConvolutions(channels, in_channels)
        self.projections = nn.ModuleDict(
            {
                name: ConvNorm(width + level[0].out_channels, out_channels, 1, silu=False)
                for name, level in self.detail.levels.items()
            }
        )
        self._remove_unused()
        self.freeze()

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """Return the transformer's stages: the embeddings, then each block."""
        return self.vit.stages()

    @property
    def patch_size(self) -> int:
        """See `Backbone`."""
        return self.vit.patch_size

    @property
    def has_class_token(self) -> bool:
        """See `Backbone`."""
        return self.vit.has_class_token

    def global_attention(self) -> list[nn.Module]:
        """Return the attention of the transformer's blocks."""
        return self.vit.global_attention()

    def keep_features(self, names: Iterable[str]) -> None:
        super().keep_features(names)
        self._remove_unused()

    def drop_stages_after(self, feature: str) -> None:
        """Do nothing: `keep_features` removes the blocks and convolutions."""

    def _remove_unused(self) -> None:
        """Remove the blocks and convolutions after the last map, and the projections of maps that are not returned."""
        deepest = max(info.stride for info in self.feature_info.values())
        for name in [name for name in self.block_indices if _STRIDES[name] > deepest]:
            del self.detail.levels[name], self.block_indices[name]
        for name in [name for name in self.projections if name not in self.feature_info]:
            del self.projections[name]
        del self.vit.blocks[max(self.block_indices.values()) + 1 :]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the maps, or the transformer's logits, of images of any size."""
        check_images("SpatialAdapter", images, in_channels=self.in_channels)
        if self.is_classifier:
            return self.vit(images)
        height, width = images.shape[-2:]
        images, _ = pad_to_multiple(images, None, self.multiple)
        semantic = self.vit.block_maps(images, list(self.block_indices.values()), norm=self.has_norm)
        maps = {}
        for x, (name, detail) in zip(semantic, self.detail(images).items()):
            if name in self.feature_info:
                stride = self.feature_info[name].stride
                if stride != self.vit.patch_size:
                    x = F.interpolate(x, size=detail.shape[-2:], mode="bilinear", align_corners=False)
                x = self.projections[name](torch.cat([x, detail], dim=1))
                maps[name] = x[..., : (height + stride - 1) // stride, : (width + stride - 1) // stride]
        return maps

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Accept weights of the transformer only, for its part."""
        super().adapt_state(state, prefix)
        names = [key.removeprefix(prefix) for key in state if key.startswith(prefix)]
        if not any(name.startswith(("vit.", "detail.", "projections.")) for name in names):
            for name in names:
                state[f"{prefix}vit.{name}"] = state.pop(f"{prefix}{name}")

    def entries_to_leave_out(self, names: Sequence[str]) -> list[str]:
        """Return the transformer's entries that the maps do not need: a classifier's head, later blocks, and the
        norm if the adapter has none."""
        if self.is_classifier:
            return []
        kept = self.vit.state_dict().keys()
        parts = ("vit.norm.", "vit.fc_norm.", *(f"vit.{part}" for part in (*self.vit.class_head, "pre_logits.")))
        blocks = {name: re.match(r"vit\.blocks\.(\d+)\.", name) for name in names}
        deeper = [name for name, block in blocks.items() if block and int(block[1]) >= len(self.vit.blocks)]
        unused = [name for name in names if name.startswith(parts) and name.removeprefix("vit.") not in kept]
        return [*unused, *deeper]

    def _url(self) -> str:
        return self.vit._url()
