"""Swin Transformer (Liu et al. 2021, https://arxiv.org/abs/2103.14030): attention in shifted windows."""

import math
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from vitkit.backbones.base import Backbone, check_images, choose_features, drop_path_rates
from vitkit.errors import ConfigError
from vitkit.nn.attention import attend
from vitkit.nn.layers import TokenMLP, run_block
from vitkit.nn.linear import Linear, linear
from vitkit.nn.windows import WindowGrid, relative_places
from vitkit.registry import BACKBONES
from vitkit.structures import FeatureInfo

_TINY = dict(embed_dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), drop_path=0.2)
_SMALL = dict(embed_dim=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24), drop_path=0.3)
_BASE = dict(embed_dim=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32), drop_path=0.5)
_LARGE = dict(embed_dim=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48), drop_path=0.2)

SWIN_VARIANTS = {
    "swin_tiny": dict(**_TINY, window=7),
    "swin_small": dict(**_SMALL, window=7),
    "swin_base": dict(**_BASE, window=7),
    "swin_large": dict(**_LARGE, window=7),
    "swin_base_384": dict(**_BASE, window=12),
    "swin_large_384": dict(**_LARGE, window=12),
}
"""The paper's section 3.3; those without a number are for images of 224 pixels."""

_WEIGHTS = {
    (96, 6, 7): "v1.0.0/swin_tiny_patch4_window7_224",
    (96, 18, 7): "v1.0.0/swin_small_patch4_window7_224",
    (128, 18, 7): "v1.0.0/swin_base_patch4_window7_224",
    (192, 18, 7): "v1.0.0/swin_large_patch4_window7_224_22kto1k",
    (128, 18, 12): "v1.0.0/swin_base_patch4_window12_384",
    (192, 18, 12): "v1.0.0/swin_large_patch4_window12_384_22kto1k",
}
"""The official ImageNet-1k weights by width, blocks of the third stage and window; no checksums are published."""

_COMPUTED = ("relative_position_index", "relative_coords_table", "attn_mask")
"""Ends of the names of official buffers that follow from the settings."""

PATCH = 4
FEATURES = ("res2", "res3", "res4", "res5")


class PatchEmbed(nn.Module):
    """Patches of 4 x 4 pixels to tokens."""

    def __init__(self, d_model: int):
        super().__init__()
        self.proj = nn.Conv2d(3, d_model, PATCH, PATCH)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, ceil(H / 4), ceil(W / 4), d_model)."""
        height, width = images.shape[-2:]
        if height % PATCH or width % PATCH:
            images = F.pad(images, (0, -width % PATCH, 0, -height % PATCH))
        return self.norm(self.proj(images).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Four neighbours to one place of twice the channels."""

    def __init__(self, d_model: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * d_model)
        self.reduction = Linear(4 * d_model, 2 * d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 2 * C)."""
        return self.reduction(self.norm(neighbours(x)))


def neighbours(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 4 * C): first the left two, from above, then the right two."""
    height, width = x.shape[1:3]
    if height % 2 or width % 2:
        x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
    x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
    return x.permute(0, 1, 3, 4, 2, 5).flatten(3)


class WindowAttention(nn.Module):
    """Attention in windows; a subclass says how its weights depend on the offset between two places."""

    def __init__(self, d_model: int, num_heads: int, *, qkv_bias: bool = True):
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ConfigError(f"Swin: num_heads={num_heads} must divide the stage's {d_model} channels.")
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.proj = Linear(d_model, d_model)

    def position_bias(self, window: int) -> Tensor:
        """(heads, N, N)."""
        raise NotImplementedError

    def qkv_bias(self) -> Tensor:
        """(3 * C,)."""
        return self.qkv.bias

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """(B * M, heads, N, d) each, and the bias broadcastable to (B * M, heads, N, N), to (B * M, heads, N, d)."""
        return attend(q, k, v, bias)

    def forward(self, x: Tensor, grid: WindowGrid, shift_bias: Tensor | None) -> Tensor:
        """
        Args:
            x: (B, H, W, C).
            grid: how it is cut.
            shift_bias: (M, 1, N, N), the grid's; None without a shift.
        Returns:
            (B, H, W, C).
        """
        qkv_bias = self.qkv_bias()
        if grid.is_padded:
            # Padding is zero, so its projection is the bias, which need not be computed.
            qkv = grid.cut(linear(x, self.qkv.weight, qkv_bias), qkv_bias)
        else:
            qkv = linear(grid.cut(x), self.qkv.weight, qkv_bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.position_bias(grid.window)[None]
        if shift_bias is not None:
            bias = (bias + shift_bias).repeat(len(x), 1, 1, 1)
        x = self.attend(q, k, v, bias)
        return self.proj(grid.join(x.transpose(1, 2).flatten(2)))


class TableAttention(WindowAttention):
    """A bias learned for each offset between two places of a window (section 3.2)."""

    def __init__(self, d_model: int, num_heads: int, *, window: int):
        super().__init__(d_model, num_heads)
        self.window = window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def position_bias(self, window: int) -> Tensor:
        table = self.relative_position_bias_table
        if window < self.window:
            inner = slice(self.window - window, self.window + window - 1)
            table = table.unflatten(0, (2 * self.window - 1, -1))[inner, inner].flatten(0, 1)
        return table[relative_places(window, table.device)].permute(2, 0, 1).contiguous()

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Resamples a table that was learned for windows of another size."""
        key = f"{prefix}relative_position_bias_table"
        if key in state:
            state[key] = resample_bias_table(state[key], len(self.relative_position_bias_table))


class SwinBlock(nn.Module):
    """Attention in windows, then the two-layer network, each after its norm."""

    recompute = False
    attention = TableAttention

    def __init__(self, d_model: int, num_heads: int, *, window: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = self.attention(d_model, num_heads, window=window)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = TokenMLP(d_model, 4 * d_model)
        self.drop_path = DropPath(drop_path) if drop_path else None

    def forward(self, x: Tensor, grid: WindowGrid, shift_bias: Tensor | None) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        x = self.add(x, self.attn(self.norm1(x), grid, shift_bias))
        return self.add(x, self.mlp(self.norm2(x)))

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """`x + branch`, in the branch's memory where it can; training drops the branch of some images."""
        if self.training and self.drop_path is not None:
            # What it makes of ones is the factor of each image: one pass over memory in place of two.
            return torch.addcmul(x, branch, self.drop_path(x.new_ones(len(x), 1, 1, 1)))
        # Under autocast the sum keeps the precision of `x`.
        return branch.add_(x) if branch.dtype == x.dtype else branch + x


class SwinStage(nn.Module):
    """Blocks without and with a shift in turn, and the merging that follows them."""

    def __init__(self, blocks: Sequence[nn.Module], window: int, downsample: nn.Module | None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.window = window
        self.downsample = downsample

    def forward(self, x: Tensor, *, shrink: bool) -> Tensor:
        """
        Args:
            x: (B, H, W, C).
            shrink: a map no larger than a window becomes one smaller window, without a shift.
        Returns:
            (B, H, W, C), before the merging.
        """
        height, width = x.shape[1:3]
        whole = shrink and min(height, width) <= self.window
        size = min(height, width) if whole else self.window
        plain = shifted = WindowGrid(height, width, size, device=x.device), None
        if not whole:
            grid = WindowGrid(height, width, size, shift=size // 2, device=x.device)
            shifted = grid, grid.shift_bias(x.device)
        for i, block in enumerate(self.blocks):
            x = run_block(block, x, *(shifted if i % 2 else plain))
        return x


@BACKBONES.register
class Swin(Backbone):
    """Maps "res2" to "res5" at strides 4 to 32, or a classifier; official state dicts of both forms fit.

    The two differ as the originals do: a classifier makes a map that is no larger than a window one smaller window,
    the other pads it, attends to the padding, and gives each map that it returns a norm of its own.

    Args:
        embed_dim: channels of res2; each stage doubles them.
        depths: blocks of each stage.
        num_heads: of each stage.
        window: places of a window's side.
        out_features: the maps to return, and no deeper stage is made; all four if None.
        num_classes: makes it a classifier.
        frozen_stages: how many stages are not trained; 1 is the patches and res2.
        drop_path: the last block's probability to be skipped in training; it grows from 0 over the blocks.
        pretrained: what `load_pretrained` loads: True, the official weights; a path, an address or a name of timm's;
            False, nothing.
    Raises:
        ConfigError: an argument is impossible.
    """

    weights = _WEIGHTS
    block = SwinBlock
    merging = PatchMerging
    class_head = ("head.",)
    optional_weights = tuple(f"norm{i}.{kind}" for i in range(4) for kind in ("weight", "bias"))

    def __init__(
        self,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        *,
        num_heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        drop_path: float = 0.2,
        pretrained: bool | str = False,
    ):
        super().__init__()
        name = type(self).__name__
        for what, value in dict(embed_dim=embed_dim, window=window).items():
            if value < 1:
                raise ConfigError(f"{name}: {what}={value}: expected at least 1.")
        if not len(depths) == len(num_heads) == len(FEATURES):
            raise ConfigError(
                f"{name}: depths={depths}, num_heads={num_heads}: expected one number for each of 4 stages."
            )
        channels = [embed_dim * 2**i for i in range(len(FEATURES))]
        available = {f: FeatureInfo(c, PATCH * 2**i) for i, (f, c) in enumerate(zip(FEATURES, channels))}
        self.feature_info = choose_features(name, available, out_features, num_classes=num_classes)
        self.is_classifier = num_classes is not None
        self.pretrained = pretrained
        self.published = (embed_dim, depths[2], window)

        num_stages = FEATURES.index(list(self.feature_info)[-1]) + 1
        rates = iter(drop_path_rates(name, drop_path, sum(depths)))
        self.patch_embed = PatchEmbed(embed_dim)
        self.layers = nn.ModuleList()
        for i in range(num_stages):
            blocks = [
                self.block(channels[i], num_heads[i], window=window, drop_path=next(rates)) for _ in range(depths[i])
            ]
            self.layers.append(SwinStage(blocks, window, self.merging(channels[i]) if i + 1 < num_stages else None))
        if self.is_classifier:
            self.norm = nn.LayerNorm(channels[-1])
            self.head = nn.Linear(channels[-1], num_classes)
        else:
            for i, feature in enumerate(FEATURES):
                if feature in self.feature_info:
                    self.add_module(f"norm{i}", nn.LayerNorm(channels[i]))
        self.apply(init_weights)
        self.frozen_stages = frozen_stages
        self.freeze()

    def norm_of(self, feature: str) -> str:
        return f"norm{FEATURES.index(feature)}"

    def drop_stages_after(self, feature: str) -> None:
        self.layers = self.layers[: FEATURES.index(feature) + 1]
        self.layers[-1].downsample = None

    def stages(self) -> list[list[nn.Module]]:
        return [[self.patch_embed], *([layer] for layer in self.layers)]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; any H and W from 4.
        Returns:
            the maps named by `out_features`, each (B, channels, ceil(H / stride), ceil(W / stride)), fine to
            coarse; a classifier returns (B, num_classes) logits.
        Raises:
            DataError: the images have not three channels, or are smaller than a patch.
        """
        check_images(type(self).__name__, images, least=PATCH)
        x = self.patch_embed(images)
        features = {}
        for i, (name, layer) in enumerate(zip(FEATURES, self.layers)):
            x = layer(x, shrink=self.is_classifier)
            if name in self.feature_info and not self.is_classifier:
                features[name] = self.get_submodule(f"norm{i}")(x).permute(0, 3, 1, 2)
            if layer.downsample is not None:
                x = layer.downsample(x)
        return self.head(self.norm(x).mean((1, 2))) if self.is_classifier else features

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Takes the names of timm, which counts the merging to the stage after it, and drops what is computed."""
        for key in [key for key in state if key.startswith(prefix)]:
            if key.endswith(_COMPUTED):
                del state[key]
        if any(key.startswith(f"{prefix}layers.{len(FEATURES) - 1}.downsample.") for key in state):
            pattern = re.compile(re.escape(prefix) + r"layers\.(\d)\.downsample\.")
            for key in sorted(key for key in state if pattern.match(key)):
                stage = int(pattern.match(key)[1]) - 1
                state[pattern.sub(f"{prefix}layers.{stage}.downsample.", key)] = state.pop(key)
        for kind in ("weight", "bias"):
            if f"{prefix}head.fc.{kind}" in state:
                state[f"{prefix}head.{kind}"] = state.pop(f"{prefix}head.fc.{kind}")
        if self.is_classifier:
            _widen_tables(state, prefix)

    def _address(self) -> str:
        if self.published not in self.weights:
            return super()._address()
        return f"https://github.com/SwinTransformer/storage/releases/download/{self.weights[self.published]}.pth"


def resample_bias_table(table: Tensor, length: int) -> Tensor:
    """Bicubic resampling of a table of offsets, ((2 * w - 1)**2, heads), to (length, heads)."""
    if len(table) == length:
        return table
    old, new = math.isqrt(len(table)), math.isqrt(length)
    grid = table.float().T.unflatten(1, (old, old))[None]
    return F.interpolate(grid, size=(new, new), mode="bicubic")[0].flatten(1).T.to(table.dtype)


def _widen_tables(state: dict[str, Tensor], prefix: str) -> None:
    """An official classifier's tables are smaller in stages whose maps, at its own image size, are smaller than a
    window: they become the middle of a whole one, which is what such maps take of it."""
    keys = [key for key in state if key.startswith(prefix) and key.endswith("relative_position_bias_table")]
    side = math.isqrt(max((len(state[key]) for key in keys), default=0))
    for key in keys:
        old = math.isqrt(len(state[key]))
        grid = state[key].T.unflatten(1, (old, old))[None]
        margin = (side - old) // 2
        state[key] = F.pad(grid, (margin,) * 4, mode="replicate")[0].flatten(1).T if margin else state[key]


def init_weights(module: nn.Module) -> None:
    """The official initialisation of linear layers."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


BACKBONES.register_variants(Swin, SWIN_VARIANTS)
