"""Multiscale Vision Transformers: MViT (Fan et al. 2021, https://arxiv.org/abs/2104.11227) and improved MViT
(Li et al. 2022, https://arxiv.org/abs/2112.01526), for images and clips."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import STAGES, BackboneBase, check_at_least_1, check_keys, drop_path_rates, init_linear
from vitkit.errors import ConfigError
from vitkit.nn.layers import Linear, TokenMLP
from vitkit.nn.pooling_attention import PoolingAttention, make_pool, pool_tokens
from vitkit.nn.vit_positions import resize_positions_1d, resize_positions_2d
from vitkit.ops.images import check_images
from vitkit.registry import BACKBONES
from vitkit.structures import FeatureInfo

_V1 = dict(positions="absolute", expand_in_attention=False, class_token=True, pooling=dict(residual=False))
_CLIP = dict(kv_stride=8, class_token=True, dropout=0.5)
_LARGE = dict(depths=(2, 6, 36, 4), embed_dim=144, num_heads=2)

MVIT_VARIANTS = {
    # Improved MViT on ImageNet-1k, table 1 of its paper.
    "mvitv2_tiny": dict(depths=(1, 2, 5, 2), drop_path=0.1),
    "mvitv2_small": dict(depths=(1, 2, 11, 2), drop_path=0.1),
    "mvitv2_base": dict(depths=(2, 3, 16, 3), drop_path=0.3),
    "mvitv2_large": dict(**_LARGE, expand_in_attention=False, drop_path=0.5),
    # The same paper's networks for ImageNet-21k, which have a class token; the huge one only exists in this form.
    "mvitv2_small_cls": dict(depths=(1, 2, 11, 2), class_token=True, drop_path=0.1),
    "mvitv2_base_cls": dict(depths=(2, 3, 16, 3), class_token=True, drop_path=0.3),
    "mvitv2_large_cls": dict(**_LARGE, class_token=True, drop_path=0.5),
    "mvitv2_huge": dict(depths=(4, 8, 60, 8), embed_dim=192, num_heads=3, class_token=True, drop_path=0.6),
    # Improved MViT on Kinetics, frames x sampling rate.
    "mvitv2_s_16x4": dict(depths=(1, 2, 11, 2), num_frames=16, **_CLIP, drop_path=0.2),
    "mvitv2_b_32x3": dict(depths=(2, 3, 16, 3), num_frames=32, **_CLIP, drop_path=0.3),
    "mvitv2_l_40x3": dict(**_LARGE, num_frames=40, image_size=312, **_CLIP, drop_path=0.75),
    # MViT: table 17 (ImageNet), then tables 4 and 5 (Kinetics) of its paper.
    "mvitv1_base_16": dict(depths=(1, 2, 11, 2), **_V1, drop_path=0.1),
    "mvitv1_b_16x4": dict(depths=(1, 2, 11, 2), num_frames=16, **(_V1 | _CLIP), drop_path=0.2),
    "mvitv1_b_32x3": dict(depths=(1, 2, 11, 2), num_frames=32, **(_V1 | _CLIP), drop_path=0.3),
    # Its published weights pool with kernels of stride + 1.
    "mvitv1_b24_32x3": dict(
        depths=(2, 3, 16, 3),
        num_frames=32,
        **(_V1 | _CLIP | dict(pooling=dict(kernel=None, residual=False))),
        drop_path=0.3,
    ),
}

PATCH_STRIDE = 4
FRAME_STRIDE = 2


class PoolingOptions(TypedDict, total=False):
    """Options for pooling queries, keys and values."""

    kind: Literal["conv", "max", "avg"]
    """Default "conv"."""
    kernel: int | None
    """Side of the kernels, default 3; None: stride + 1."""
    residual: bool
    """Whether the pooled queries of every block are added to its output (improved MViT, the default)."""


class BlockShape(NamedTuple):
    """Stage, channels, heads, strides and sizes of a block."""

    stage: int
    in_channels: int
    out_channels: int
    num_heads: int
    q_stride: tuple[int, ...]
    kv_stride: tuple[int, ...]
    size: tuple[int, ...]
    """Size of the input map, for images of the size that the network was created for."""
    window: int | None


class PatchEmbed(nn.Module):
    """Embeds overlapping patches of 7 x 7 pixels (and 3 frames) as tokens, at strides of 4 (and 2)."""

    def __init__(self, in_channels: int, channels: int, axes: int):
        super().__init__()
        self.proj = (
            nn.Conv2d(in_channels, channels, 7, PATCH_STRIDE, 3)
            if axes == 2
            else nn.Conv3d(in_channels, channels, (3, 7, 7), (FRAME_STRIDE, PATCH_STRIDE, PATCH_STRIDE), (1, 3, 3))
        )

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """(B, 3, H, W) or (B, 3, T, H, W) -> (B, tokens, channels), and the map's size."""
        # With channels last, the tokens are already consecutive in memory.
        channels_last = torch.channels_last if images.ndim == 4 else torch.channels_last_3d
        maps = self.proj(images.contiguous(memory_format=channels_last))
        return maps.flatten(2).transpose(1, 2), tuple(maps.shape[2:])


class MViTBlock(nn.Module):
    """Pooling attention, then the MLP, each preceded by its norm; the first block of a stage pools the map.

    Args:
        shape: channels, heads, strides and window.
        drop_path: probability of being skipped in training.
        pooling: see `PoolingOptions`.
        expand_in_attention: whether channels increase in the attention rather than in the MLP.
        relative_positions: whether attention has decomposed relative positions.
        class_token: whether the tokens begin with a class token.
    """

    activation_checkpointing = False

    def __init__(
        self,
        shape: BlockShape,
        *,
        drop_path: float,
        pooling: PoolingOptions,
        expand_in_attention: bool,
        relative_positions: bool,
        class_token: bool,
    ):
        super().__init__()
        kernel, residual = pooling.get("kernel", 3), pooling.get("residual", True)
        channels = shape.out_channels if expand_in_attention else shape.in_channels
        pooled = zip(shape.size, shape.q_stride, shape.kv_stride)
        pools_queries = residual or max(shape.q_stride) > 1
        self.norm1 = nn.LayerNorm(shape.in_channels, eps=1e-6)
        self.attn = PoolingAttention(
            shape.in_channels,
            channels,
            num_heads=shape.num_heads,
            pool=pooling.get("kind", "conv"),
            q_kernel=kernels(kernel, shape.q_stride) if pools_queries else (1,) * len(shape.size),
            q_stride=shape.q_stride,
            kv_kernel=kernels(kernel, shape.kv_stride),
            kv_stride=shape.kv_stride,
            residual=residual,
            positions=[max(size // q, size // kv) for size, q, kv in pooled] if relative_positions else None,
            class_token=class_token,
            window=shape.window,
        )
        self.norm2 = nn.LayerNorm(channels, eps=1e-6)
        self.mlp = TokenMLP(channels, 4 * channels, shape.out_channels)
        grows = shape.in_channels != shape.out_channels
        self.proj = Linear(shape.in_channels, shape.out_channels) if grows else None
        self.pool_skip = make_pool("max", channels, kernels(None, shape.q_stride), shape.q_stride)
        self.drop_path = StochasticDepth(drop_path, "row")
        self.expand_in_attention = expand_in_attention
        self.class_token = class_token

    def forward(self, x: Tensor, size: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """Attend and transform.

        Args:
            x: (B, [1 +] tokens, in_channels).
            size: size of the map.
        Returns:
            (B, [1 +] pooled tokens, out_channels), and the pooled map's size.
        """
        normed = self.norm1(x)
        attended, pooled_size = self.attn(normed, size)
        if self.proj is not None and self.expand_in_attention:
            x = self.proj(normed)
        x, _ = pool_tokens(x, size, self.pool_skip, class_token=self.class_token)
        x = x + self.drop_path(attended)
        normed = self.norm2(x)
        if self.proj is not None and not self.expand_in_attention:
            x = self.proj(normed)
        return x + self.drop_path(self.mlp(normed)), pooled_size


def kernels(kernel: int | None, strides: Sequence[int]) -> tuple[int, ...]:
    """Return the pooling kernel along each axis; None means stride + 1, but 1 along axes with stride 1."""
    return tuple(kernel or (s + 1 if s > 1 else 1) for s in strides)


@BACKBONES.register
class MViT(BackboneBase):
    """MViT: maps "res2" to "res5" at strides 4 to 32, or a classifier; loads official state dicts of both forms.

    The classifier attends to the full map, with pooled keys. The backbone is the paper's for detection (section 4.3):
    the blocks attend within windows, except for the last ones of res3, res4 and res5 (of these, the first two pool
    their keys twice as much); it has no class token, and a norm for each returned map. With clips, both attend to the
    full map.

    Args:
        depths: number of blocks in each stage.
        embed_dim: channels of res2; they double with each stage.
        num_heads: number of heads in res2; it doubles with each stage.
        kv_stride: pooling stride of keys and values in res2; it is halved with each stage.
        pooling: see `PoolingOptions`.
        expand_in_attention: whether channels increase in a stage's first attention, rather than in the last MLP of the
            previous stage.
        positions: "relative" (decomposed) or "absolute" (added to the patches; for clips, separately for space and
            time).
        class_token: whether a classifier reads a class token rather than the mean of all tokens.
        image_size: side of the images, in pixels, that the position tables are made for; they are resized for other
            images.
        num_frames: number of frames likewise, if the input is clips; None for images.
        window_size: side of res2's windows in tokens, halved with each stage. None: attend to the full map.
        dropout: fraction of a classifier's inputs that is dropped in training.
        drop_path: see `drop_path_rates`.
        num_classes, options: the arguments of `BackboneBase`.
    Raises:
        ConfigError: an argument is invalid.
    """

    class_head = ("head.",)
    input_weight = "patch_embed.proj.weight"
    classifier_parts = ("norm.",)
    stage_pattern = r"blocks\.\d+\."
    optional_weights = tuple(f"scale{i}_norm.{kind}" for i in range(2, 6) for kind in ("weight", "bias"))

    def __init__(
        self,
        depths: Sequence[int] = (1, 2, 5, 2),
        embed_dim: int = 96,
        *,
        num_heads: int = 1,
        kv_stride: int = 4,
        pooling: PoolingOptions | None = None,
        expand_in_attention: bool = True,
        positions: Literal["relative", "absolute"] = "relative",
        class_token: bool = False,
        image_size: int = 224,
        num_frames: int | None = None,
        window_size: int | None = 56,
        dropout: float = 0.0,
        num_classes: int | None = None,
        drop_path: float = 0.1,
        **options: Any,
    ):
        pooling = pooling or {}
        check_keys("pooling", pooling, PoolingOptions)
        if len(depths) != len(STAGES) or min(depths) < 1:
            raise ConfigError(f"depths={tuple(depths)}: expected at least one block in each of 4 stages.")
        check_at_least_1(embed_dim=embed_dim, kv_stride=kv_stride)
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"num_heads={num_heads} must divide embed_dim={embed_dim}.")
        if positions not in ("relative", "absolute"):
            raise ConfigError(f"positions={positions!r}: expected 'relative' or 'absolute'.")
        if window_size is not None and window_size < 1:
            raise ConfigError(f"window_size={window_size}: expected at least 1, or None for the full map.")
        if image_size < 8 * PATCH_STRIDE or (num_frames is not None and num_frames < FRAME_STRIDE):
            raise ConfigError(
                f"image_size={image_size}, num_frames={num_frames}: expected at least {8 * PATCH_STRIDE} pixels, "
                f"and {FRAME_STRIDE} frames of clips."
            )
        side = image_size // PATCH_STRIDE
        grid = (side, side) if num_frames is None else (num_frames // FRAME_STRIDE, side, side)

        shapes = block_shapes(
            depths,
            channels=embed_dim,
            num_heads=num_heads,
            kv_stride=kv_stride,
            grid=grid,
            expand_in_attention=expand_in_attention,
            window=window_size if num_classes is None and num_frames is None else None,
        )
        channels = {STAGES[shape.stage]: shape.out_channels for shape in shapes}
        available = {name: FeatureInfo(channels[name], PATCH_STRIDE * 2**i) for i, name in enumerate(STAGES)}
        super().__init__(available, num_classes=num_classes, **options)
        self.axes = len(grid)
        self.grid = grid
        self.class_token = class_token and self.is_classifier
        num_stages = len(self.stages_to_build)
        self.stage_of_block = [shape.stage for shape in shapes if shape.stage < num_stages]

        self.patch_embed = PatchEmbed(self.in_channels, embed_dim, self.axes)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if self.class_token else None
        self.pos_embed = self.pos_embed_spatial = None
        if positions == "absolute":
            self._make_positions(embed_dim)
        self.blocks = nn.ModuleList(
            MViTBlock(
                shape,
                drop_path=rate,
                pooling=pooling,
                expand_in_attention=expand_in_attention,
                relative_positions=positions == "relative",
                class_token=self.class_token,
            )
            for shape, rate in zip(shapes, drop_path_rates(drop_path, len(shapes)))
            if shape.stage < num_stages
        )
        if self.is_classifier:
            self.norm = nn.LayerNorm(shapes[-1].out_channels, eps=1e-6)
            self.head = nn.Sequential()
            self.head.add_module("dropout", nn.Dropout(dropout))
            self.head.add_module("projection", nn.Linear(shapes[-1].out_channels, num_classes))
        else:
            for name, info in self.feature_info.items():
                self.add_module(norm_name(name), nn.LayerNorm(info.channels, eps=1e-6))
        for parameter in self._stem_parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
        self.apply(init_linear)
        self.freeze()

    def _make_positions(self, channels: int) -> None:
        """Create absolute positions: tables for space, time and class token for clips, a single one for images."""
        tokens = math.prod(self.grid[-2:])
        if self.axes == 2:
            self.pos_embed = nn.Parameter(torch.zeros(1, tokens + self.class_token, channels))
            return
        self.pos_embed_spatial = nn.Parameter(torch.zeros(1, tokens, channels))
        self.pos_embed_temporal = nn.Parameter(torch.zeros(1, self.grid[0], channels))
        if self.class_token:
            self.pos_embed_class = nn.Parameter(torch.zeros(1, 1, channels))

    def _stem_parameters(self) -> list[nn.Parameter]:
        """Return the class token and absolute positions."""
        return list(self.parameters(recurse=False))

    @property
    def has_class_token(self) -> bool:
        """See `Backbone`."""
        return self.class_token

    @property
    def num_frames(self) -> int | None:
        """See `Backbone`."""
        return self.grid[0] * FRAME_STRIDE if self.axes == 3 else None

    def norm_of(self, feature: str) -> str:
        return norm_name(feature)

    def drop_stages_after(self, feature: str) -> None:
        deepest = STAGES.index(feature)
        self.stage_of_block = [stage for stage in self.stage_of_block if stage <= deepest]
        self.blocks = self.blocks[: len(self.stage_of_block)]

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        blocks = [[] for _ in range(self.stage_of_block[-1] + 1)]
        for stage, block in zip(self.stage_of_block, self.blocks):
            blocks[stage].append(block)
        return [[self.patch_embed, *self._stem_parameters()], *blocks]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the features, or a classifier's logits.

        Args:
            images: (B, 3, H, W) float, normalized, any H and W from 4; for clips (B, 3, T, H, W), any T.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), for clips (B,
            channels, ceil(T / 2), ...), fine to coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images do not have three channels, or are smaller than the patches' stride.
        """
        check_images("MViT", images, min_size=PATCH_STRIDE, clips=self.axes == 3, in_channels=self.in_channels)
        x, size = self.patch_embed(images)
        x = self._add_positions(x, size)
        features = {}
        for i, (stage, block) in enumerate(zip(self.stage_of_block, self.blocks)):
            x, size = block(x, size)
            name = STAGES[stage]
            if stage not in self.stage_of_block[i + 1 :] and name in self.feature_info and not self.is_classifier:
                normed = self.get_submodule(norm_name(name))(x)
                features[name] = normed.transpose(1, 2).unflatten(2, size).contiguous()
        if not self.is_classifier:
            return features
        x = self.norm(x)
        return self.head(x[:, 0] if self.class_token else x.mean(1))

    def _add_positions(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        """Add absolute positions, and prepend the class token."""
        class_token = self.cls_token
        if self.pos_embed is not None:
            token_position, table = self.pos_embed.split([int(self.class_token), math.prod(self.grid)], dim=1)
            x = x + resize_positions_2d(table, self.grid, size, mode="bilinear")
            class_token = class_token + token_position if self.class_token else None
        elif self.pos_embed_spatial is not None:
            space = resize_positions_2d(self.pos_embed_spatial, self.grid[1:], size[1:], mode="bilinear")
            time = resize_positions_1d(self.pos_embed_temporal[0], size[0])[None]
            x = x + (time[:, :, None] + space[:, None]).flatten(1, 2)
            class_token = class_token + self.pos_embed_class if self.class_token else None
        return x if class_token is None else torch.cat((class_token.expand(x.shape[0], -1, -1), x), dim=1)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert official weights for another image size, or in the other form, to this network's."""
        super().adapt_state(state, prefix)
        merge_projections(state, prefix)
        if not self.class_token:
            state.pop(f"{prefix}cls_token", None)
            state.pop(f"{prefix}pos_embed_class", None)
        for name, parameter in self.state_dict().items():
            key = prefix + name
            if key not in state or state[key].shape == parameter.shape:
                continue
            value = state[key]
            if value.ndim == parameter.ndim + 1 and value.ndim == 5 and value.shape[2] == 1:
                state[key] = value.squeeze(2)  # kernels for one frame
            elif "rel_pos_" in name and value.ndim == 2:
                state[key] = resize_positions_1d(value, len(parameter))
            elif name == "pos_embed_temporal":
                state[key] = resize_positions_1d(value[0], parameter.shape[1])[None]
            elif name in ("pos_embed", "pos_embed_spatial"):
                state[key] = self._adapt_positions(value, has_token=name == "pos_embed" and self.class_token)

    def _adapt_positions(self, value: Tensor, *, has_token: bool) -> Tensor:
        """Resize a table for another image size, with or without a row for the class token before it, to this grid."""
        side = math.isqrt(value.shape[1])
        if value.shape[1] - side**2 not in (0, 1):
            return value  # not for a square image: `load_weights` reports the shapes
        token, table = value[:, : value.shape[1] - side**2], value[:, value.shape[1] - side**2 :]
        table = resize_positions_2d(table, (side, side), self.grid[-2:], mode="bilinear")
        return torch.cat((token, table), dim=1) if has_token else table


def block_shapes(
    depths: Sequence[int],
    *,
    channels: int,
    num_heads: int,
    kv_stride: int,
    grid: tuple[int, ...],
    expand_in_attention: bool,
    window: int | None,
) -> list[BlockShape]:
    """Return the channels, heads, strides and windows of all blocks, in order (table 1 of both papers).

    Args:
        channels, num_heads, kv_stride, window: those of res2.
        grid: size of the map of patches.
    """

    def along_axes(stride: int) -> tuple[int, ...]:
        return (1,) * (len(grid) - 2) + (stride, stride)

    shapes = []
    size = grid
    for stage, depth in enumerate(depths):
        for i in range(depth):
            pools_map, last = i == 0 and stage > 0, i == depth - 1
            keys = max(kv_stride >> stage, 1)
            hybrid = window is not None and last and stage > 0
            if hybrid and stage < len(depths) - 1:
                keys *= 2
            grows_here = pools_map if expand_in_attention else last and stage < len(depths) - 1
            shapes.append(
                BlockShape(
                    stage,
                    in_channels=channels,
                    out_channels=2 * channels if grows_here else channels,
                    num_heads=num_heads << stage,
                    q_stride=along_axes(2 if pools_map else 1),
                    kv_stride=along_axes(keys),
                    size=size,
                    # A stage's first block still has the map, and so the windows, of the previous stage.
                    window=None if window is None or hybrid else window >> (stage - pools_map),
                )
            )
            channels = shapes[-1].out_channels
            if pools_map:
                size = (*size[:-2], size[-2] // 2, size[-1] // 2)
    return shapes


def norm_name(feature: str) -> str:
    """Return the name that the official detectors use for the norm of a returned map."""
    return f"scale{feature.removeprefix('res')}_norm"


def merge_projections(state: dict[str, Tensor], prefix: str) -> None:
    """Concatenate the projections of queries, keys and values, which older official weights store separately."""
    for key in list(state):
        if not key.startswith(prefix) or ".attn.q." not in key:
            continue
        parts = [key.replace(".attn.q.", f".attn.{name}.") for name in "qkv"]
        if all(part in state for part in parts):
            state[key.replace(".attn.q.", ".attn.qkv.")] = torch.cat([state.pop(part) for part in parts])


BACKBONES.register_variants(MViT, MVIT_VARIANTS)
