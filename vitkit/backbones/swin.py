"""Swin Transformer (Liu et al. 2021, https://arxiv.org/abs/2103.14030): attention in shifted windows."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import STAGES, BackboneBase, check_at_least_1, drop_path_rates, four_stages, init_linear
from vitkit.errors import ConfigError
from vitkit.kernels.linear import linear
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.nn.attention import attend
from vitkit.nn.layers import Linear, TokenMLP
from vitkit.nn.vit_positions import resize_positions_2d
from vitkit.nn.windows import relative_position_index, shift_bias
from vitkit.ops.images import check_images, pad_to_multiple
from vitkit.registry import BACKBONES

TINY = dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), drop_path=0.2)
SMALL = dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path=0.3)
BASE = dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path=0.5)
LARGE = dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48), drop_path=0.2)

SWIN_VARIANTS = {
    "swin_tiny": dict(**TINY, window=7),
    "swin_small": dict(**SMALL, window=7),
    "swin_base": dict(**BASE, window=7),
    "swin_large": dict(**LARGE, window=7),
    "swin_base_384": dict(**BASE, window=12),
    "swin_large_384": dict(**LARGE, window=12),
}
"""The variants of the paper's section 3.3; those without a number are for images of 224 pixels."""

_WEIGHTS = {
    (96, 6, 7): "v1.0.0/swin_tiny_patch4_window7_224",
    (96, 18, 7): "v1.0.0/swin_small_patch4_window7_224",
    (128, 18, 7): "v1.0.0/swin_base_patch4_window7_224",
    (192, 18, 7): "v1.0.0/swin_large_patch4_window7_224_22kto1k",
    (128, 18, 12): "v1.0.0/swin_base_patch4_window12_384",
    (192, 18, 12): "v1.0.0/swin_large_patch4_window12_384_22kto1k",
}
"""Official ImageNet-1k weights by (width, blocks of the third stage, window); no checksums are published."""

_COMPUTED = ("relative_position_index", "relative_coords_table", "attn_mask")
"""Suffixes of official buffers that are computed from the arguments."""

PATCH = 4


class PatchEmbed(nn.Module):
    """Embeds patches of 4 x 4 pixels by a linear projection and a norm."""

    def __init__(self, d_model: int, in_channels: int):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, d_model, PATCH, PATCH)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, ceil(H / 4), ceil(W / 4), d_model)."""
        height, width = images.shape[-2:]
        if height % PATCH or width % PATCH:
            images, _ = pad_to_multiple(images, None, PATCH)
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Patch merging: 2 x 2 pixels become one with twice the channels."""

    def __init__(self, d_model: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * d_model)
        self.reduction = Linear(4 * d_model, 2 * d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 2 * C)."""
        return self.reduction(self.norm(merge_patches(x)))


def merge_patches(x: Tensor) -> Tensor:
    """Concatenate the channels of 2 x 2 pixels: the left two, top to bottom, then the right two.

    (B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 4 * C).
    """
    batch_size, height, width, channels = x.shape
    rows, columns = (height + 1) // 2, (width + 1) // 2
    if height % 2 or width % 2:
        x = F.pad(x, (0, 0, 0, 2 * columns - width, 0, 2 * rows - height))
    x = x.reshape(batch_size, rows, 2, columns, 2, channels)
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3)


class BaseWindowAttention(nn.Module):
    """Attention in windows; a subclass defines how its scores depend on the offset between query and key."""

    def __init__(self, d_model: int, num_heads: int, *, qkv_bias: bool = True):
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ConfigError(f"num_heads={num_heads} must divide the stage's {d_model} channels.")
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.proj = Linear(d_model, d_model)

    def position_bias(self, window: int) -> Tensor:
        """Return the bias for each query and key of a window, (heads, N, N)."""
        raise NotImplementedError

    def qkv_bias(self) -> Tensor:
        """Return the bias of the projection to queries, keys and values, (3 * C,)."""
        return self.qkv.bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attend: q, k, v and the result are (B * M, heads, N, d), the bias broadcastable to (B * M, heads, N, N)."""
        return attend(q, k, v, bias)

    def forward(self, x: Tensor, window: int, shift: int, mask_bias: Tensor | None) -> Tensor:
        """Attend in windows.

        Args:
            x: (B, H, W, C).
            window: side of the windows, in pixels of the map.
            shift: number of pixels by which the windows are shifted.
            mask_bias: (M, 1, N, N), from `shift_bias`; None without a shift.
        Returns:
            (B, H, W, C).
        """
        batch_size, height, width, _ = x.shape
        qkv_bias = self.qkv_bias()
        if height % window or width % window:
            # Padding is zero, so its projection is just the bias and need not be computed.
            qkv = linear(x, self.qkv.weight, qkv_bias)
            qkv = window_partition(qkv, window, shift=shift, padding_value=qkv_bias)
        else:
            qkv = linear(window_partition(x, window, shift=shift), self.qkv.weight, qkv_bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.position_bias(window)[None]
        if mask_bias is not None:
            bias = (bias + mask_bias).repeat(batch_size, 1, 1, 1)
        x = self.attend(q, k, v, bias)
        return self.proj(window_reverse(x.transpose(1, 2).flatten(2), window, (height, width), shift=shift))


class WindowAttention(BaseWindowAttention):
    """Window attention with a learned bias for each offset between query and key (section 3.2)."""

    def __init__(self, d_model: int, num_heads: int, *, window: int):
        super().__init__(d_model, num_heads)
        self.window = window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def position_bias(self, window: int) -> Tensor:
        """Return the bias for each query and key of a window, (heads, N, N)."""
        table = self.relative_position_bias_table
        if window < self.window:
            inner = slice(self.window - window, self.window + window - 1)
            table = table.unflatten(0, (2 * self.window - 1, -1))[inner, inner].flatten(0, 1)
        return table[relative_position_index(window, table.device)].permute(2, 0, 1).contiguous()

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Resample a bias table that was learned for windows of another size."""
        key = f"{prefix}relative_position_bias_table"
        if key in state:
            old, new = (math.isqrt(len(table)) for table in (state[key], self.relative_position_bias_table))
            state[key] = resize_positions_2d(state[key][None], (old, old), (new, new))[0]


class SwinBlock(nn.Module):
    """Window attention, then the MLP, each preceded by its norm."""

    activation_checkpointing = False
    attention = WindowAttention

    def __init__(self, d_model: int, num_heads: int, *, window: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = self.attention(d_model, num_heads, window=window)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = TokenMLP(d_model, 4 * d_model)
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x: Tensor, window: int, shift: int, mask_bias: Tensor | None) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        x = self.add(x, self.attn(self.norm1(x), window, shift, mask_bias))
        return self.add(x, self.mlp(self.norm2(x)))

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return `x + branch`, in the branch's memory if possible; in training, drop the branch for random images."""
        if self.training and self.drop_path.p:
            # Applied to ones, it gives the factor of each image: one pass over memory instead of two.
            return torch.addcmul(x, branch, self.drop_path(x.new_ones(len(x), 1, 1, 1)))
        # Under autocast, the sum keeps the precision of `x`.
        return branch.add_(x) if branch.dtype == x.dtype else branch + x


class SwinStage(nn.Module):
    """Blocks, alternately without and with a shift, and the patch merging that follows them."""

    def __init__(self, blocks: Sequence[nn.Module], window: int, downsample: nn.Module | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.window = window
        self.downsample = downsample

    def forward(self, x: Tensor, *, shrink: bool) -> Tensor:
        """Run the blocks.

        Args:
            x: (B, H, W, C).
            shrink: process a map that is no larger than a window as one smaller window, without a shift.
        Returns:
            (B, H, W, C), before the patch merging.
        """
        height, width = x.shape[1:3]
        window, shift = self.window, self.window // 2
        if shrink and min(height, width) <= window:
            window, shift = min(height, width), 0
        mask_bias = shift_bias((height, width), window, shift, device=x.device) if shift else None
        for i, block in enumerate(self.blocks):
            x = block(x, window, *((shift, mask_bias) if i % 2 else (0, None)))
        return x


@BACKBONES.register
class Swin(BackboneBase):
    """Swin Transformer: maps "res2" to "res5" at strides 4 to 32, or a classifier; loads official state dicts of both.

    The two differ as the originals do: a classifier processes a map that is no larger than a window as one smaller
    window; the backbone pads it, attends to the padding, and has a norm for each returned map.

    Args:
        embed_dim: channels of res2, which double with each stage.
        depths: number of blocks in each stage.
        num_heads: number of heads in each stage.
        window: side of the windows, in pixels of the map.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`; pretrained=True means the official weights.
    Raises:
        ConfigError: an argument is invalid.
    """

    weights = _WEIGHTS
    block = SwinBlock
    merging = PatchMerging
    class_head = ("head.",)
    classifier_parts = ("norm.",)
    stage_pattern = r"layers\.\d\.(downsample\.)?"
    input_weight = "patch_embed.proj.weight"
    optional_weights = tuple(f"norm{i}.{kind}" for i in range(4) for kind in ("weight", "bias"))

    def __init__(
        self,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        *,
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        drop_path: float = 0.2,
        **options: Any,
    ):
        check_at_least_1(embed_dim=embed_dim, window=window)
        if not len(depths) == len(num_heads) == len(STAGES):
            raise ConfigError(f"depths={depths}, num_heads={num_heads}: expected one number for each of 4 stages.")
        available = four_stages(embed_dim)
        super().__init__(available, **options)
        num_stages = len(self.stages_to_build)
        channels = [info.channels for info in available.values()]
        self.published = (embed_dim, depths[2], window)

        rates = iter(drop_path_rates(drop_path, sum(depths)))
        self.patch_embed = PatchEmbed(embed_dim, self.in_channels)
        self.layers = nn.ModuleList()
        for i in range(num_stages):
            blocks = [
                self.block(channels[i], num_heads[i], window=window, drop_path=next(rates)) for _ in range(depths[i])
            ]
            downsample = self.merging(channels[i]) if i + 1 < num_stages else None
            self.layers.append(SwinStage(blocks, window, downsample))
        if self.is_classifier:
            self.norm = nn.LayerNorm(channels[-1])
            self.head = nn.Linear(channels[-1], self.num_classes)
        else:
            for i, feature in enumerate(STAGES):
                if feature in self.feature_info:
                    self.add_module(f"norm{i}", nn.LayerNorm(channels[i]))
        self.apply(init_linear)
        self.freeze()

    @property
    def window_depends_on_size(self) -> bool:
        """See `Backbone`; only a classifier's windows shrink."""
        return self.is_classifier

    def norm_of(self, feature: str) -> str:
        return f"norm{STAGES.index(feature)}"

    def drop_stages_after(self, feature: str) -> None:
        self.layers = self.layers[: STAGES.index(feature) + 1]
        self.layers[-1].downsample = None

    def stages(self) -> list[list[nn.Module]]:
        return [[self.patch_embed], *([layer] for layer in self.layers)]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the features, or a classifier's logits, of images of at least 4 pixels."""
        check_images(type(self).__name__, images, min_size=PATCH, in_channels=self.in_channels)
        x = self.patch_embed(images)
        features = {}
        for i, (name, layer) in enumerate(zip(STAGES, self.layers)):
            x = layer(x, shrink=self.is_classifier)
            if name in self.feature_info and not self.is_classifier:
                features[name] = self.get_submodule(f"norm{i}")(x).permute(0, 3, 1, 2)
            if layer.downsample is not None:
                x = layer.downsample(x)
        return self.head(self.norm(x).mean((1, 2))) if self.is_classifier else features

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert timm's names, which assign the patch merging to the following stage, and drop computed buffers."""
        super().adapt_state(state, prefix)
        for key in [key for key in state if key.startswith(prefix)]:
            if key.endswith(_COMPUTED):
                del state[key]
        if any(key.startswith(f"{prefix}layers.{len(STAGES) - 1}.downsample.") for key in state):
            pattern = re.compile(re.escape(prefix) + r"layers\.(\d)\.downsample\.")
            for key in sorted(key for key in state if pattern.match(key)):
                stage = int(pattern.match(key)[1]) - 1
                state[pattern.sub(f"{prefix}layers.{stage}.downsample.", key)] = state.pop(key)
        for kind in ("weight", "bias"):
            if f"{prefix}head.fc.{kind}" in state:
                state[f"{prefix}head.{kind}"] = state.pop(f"{prefix}head.fc.{kind}")
        if self.is_classifier:
            _widen_tables(state, prefix)

    def _url(self) -> str:
        if self.published not in self.weights:
            return super()._url()
        return f"https://github.com/SwinTransformer/storage/releases/download/{self.weights[self.published]}.pth"


def _widen_tables(state: dict[str, Tensor], prefix: str) -> None:
    """Pad the tables of smaller windows, centered, to the size for a full window.

    Official classifiers have such tables in stages whose maps, at the trained image size, are smaller than a window.
    """
    keys = [key for key in state if key.startswith(prefix) and key.endswith("relative_position_bias_table")]
    side = math.isqrt(max((len(state[key]) for key in keys), default=0))
    for key in keys:
        old = math.isqrt(len(state[key]))
        grid = state[key].T.unflatten(1, (old, old))[None]
        margin = (side - old) // 2
        state[key] = F.pad(grid, (margin,) * 4, mode="replicate")[0].flatten(1).T if margin else state[key]


BACKBONES.register_variants(Swin, SWIN_VARIANTS)
