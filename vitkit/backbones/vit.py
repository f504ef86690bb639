"""Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929), with DeiT's distillation token
(Touvron et al. 2020, https://arxiv.org/abs/2012.12877), register tokens (Darcet et al. 2023,
https://arxiv.org/abs/2309.16588) and ViTDet's windows (Li et al. 2022, https://arxiv.org/abs/2203.16527).

Shapes: B batch, h x w patches, L tokens (class, distillation and register tokens, then the patches row by row).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import get_model_weights
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import BackboneBase, BackboneSettings, check_images, drop_path_rates
from vitkit.errors import CheckpointError, ConfigError
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.nn.attention import attend
from vitkit.nn.layers import Linear, TokenMLP, checkpoint_block
from vitkit.nn.position import resize_positions_1d, resize_positions_2d
from vitkit.nn.relative_attention import attend_relative
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

_SIZES = {
    "tiny": dict(d_model=192, depth=12, num_heads=3),
    "small": dict(d_model=384, depth=12, num_heads=6),
    "base": dict(d_model=768, depth=12, num_heads=12),
    "large": dict(d_model=1024, depth=24, num_heads=16),
    "huge": dict(d_model=1280, depth=32, num_heads=16),
}
_VITDET = dict(patch_size=16, window_size=14, relative_positions=64)

VIT_VARIANTS = {
    **{f"vit_{n}_patch{p}": dict(patch_size=p, **size) for n, size in _SIZES.items() for p in (32, 16, 14)},
    **{f"deit_{n}_distilled_patch16": dict(distilled=True, **_SIZES[n]) for n in ("tiny", "small", "base")},
    **{
        f"vitdet_{n}": dict(**_SIZES[n], **_VITDET, drop_path=drop_path)
        for n, drop_path in (("base", 0.1), ("large", 0.4), ("huge", 0.5))
    },
}
"""Table 1 of the paper (B, L, H); table 1 of DeiT (Ti, S; distilled); section 4 and appendix A.2 of ViTDet."""

_DEIT = "https://dl.fbaipublicfiles.com/deit/deit_{}_patch16_224-{}.pth#sha256={}"
_DEIT_CHECKSUMS = {
    "tiny": "a1311bcf",
    "small": "cd65a155",
    "base": "b5f2ef4d",
    "tiny_distilled": "b40b3cf7",
    "small_distilled": "649709d9",
    "base_distilled": "df68dfff",
}
_TORCHVISION = {
    (768, 32): ("vit_b_32", "IMAGENET1K_V1"),
    (1024, 16): ("vit_l_16", "IMAGENET1K_V1"),
    (1024, 32): ("vit_l_32", "IMAGENET1K_V1"),
    (1280, 14): ("vit_h_14", "IMAGENET1K_SWAG_LINEAR_V1"),
}
"""Published weights that were trained on images normalised as vitkit does, by width and patch size."""


def add(branch: Tensor, x: Tensor) -> Tensor:
    """Return `x + branch`, in the branch's memory unless autocast is on, where the sum keeps full precision."""
    return branch.add_(x) if branch.dtype == x.dtype else branch + x


class PatchEmbedding(nn.Module):
    """Linear projection of patches."""

    def __init__(self, patch_size: int, d_model: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, d_model, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), zero-padded at the right and bottom to full patches, to (B, d_model, h, w)."""
        height, width = images.shape[-2:]
        margins = (0, -width % self.patch_size, 0, -height % self.patch_size)
        return self.proj(F.pad(images, margins) if any(margins) else images)


class Attention(nn.Module):
    """Self-attention of all tokens, or within windows of patches.

    Args:
        window_size: side of the windows, in patches; None for all tokens.
        relative_positions: side, in patches, of the map that decomposed relative positions (ViTDet, section 3; Li et
            al. 2021, https://arxiv.org/abs/2112.01526, equation 4) are made for; None for none.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, window_size: int | None = None, relative_positions: int | None = None
    ):
        super().__init__()
        self.num_heads = num_heads
        self.window_size = window_size
        self.qkv = Linear(d_model, 3 * d_model)
        self.proj = Linear(d_model, d_model)
        self.rel_pos_h = self.rel_pos_w = None
        if relative_positions is not None:
            shape = (2 * relative_positions - 1, d_model // num_heads)
            self.rel_pos_h = nn.Parameter(torch.zeros(shape))
            self.rel_pos_w = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Attend.

        Args:
            x: (B, L, d_model); with windows or relative positions L = h * w.
            size: (h, w).
        """
        if self.window_size is None:
            return self._attend(x, size)
        # As in the original, windows over the border see zeros there, after the norm.
        windows = window_partition(x.unflatten(1, size), self.window_size)
        windows = self._attend(windows, (self.window_size, self.window_size))
        return window_reverse(windows, self.window_size, size).flatten(1, 2)

    def _attend(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if self.rel_pos_h is None:
            x = attend(q, k, v)
        else:
            x = attend_relative(q, k, v, (self.rel_pos_h, self.rel_pos_w), size, size)
        return self.proj(x.transpose(1, 2).flatten(2))

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Resize relative positions that were made for maps of another size."""
        for name in ("rel_pos_h", "rel_pos_w"):
            table, key = getattr(self, name), prefix + name
            if table is not None and key in state:
                state[key] = resize_positions_1d(state[key], len(table))


class Block(nn.Module):
    """Pre-norm transformer layer."""

    activation_checkpointing = False

    def __init__(self, d_model: int, attention: Attention, *, d_mlp: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.attn = attention
        self.norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.mlp = TokenMLP(d_model, d_mlp)
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model)."""
        x = add(self.drop_path(self.attn(self.norm1(x), size)), x)
        return add(self.drop_path(self.mlp(self.norm2(x))), x)


@dataclass(frozen=True)
class ViTSizes:
    """The sizes of a plain vision transformer."""

    patch_size: int = 16
    """In pixels; 1 is a transformer on pixels."""
    d_model: int = 768
    """Width, a multiple of `num_heads`."""
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    """Hidden width of each block's MLP, in widths."""

    def check(self, owner: str) -> None:
        """Raise ConfigError if a size is impossible; `owner` is the backbone's name in messages."""
        for name in ("patch_size", "d_model", "depth", "num_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{owner}: {name}={getattr(self, name)}: expected at least 1.")
        if self.d_model % self.num_heads:
            raise ConfigError(f"{owner}: num_heads={self.num_heads} must divide d_model={self.d_model}.")

    def feature_info(self) -> dict[str, FeatureInfo]:
        """Return the one map, res{log2 stride}."""
        return {f"res{round(math.log2(self.patch_size))}": FeatureInfo(self.d_model, self.patch_size)}


@dataclass(frozen=True)
class WindowSettings:
    """Blocks that attend within windows, as ViTDet has them for dense prediction.

    There is then no class token, no norm after the last block, and, as in the original, no antialiasing when position
    embeddings are resampled.
    """

    window_size: int | None = None
    """Side, in patches, of the windows that all but a few blocks attend in; None for none."""
    global_blocks: Sequence[int] | None = None
    """Indices of the global blocks; None: the last of each quarter."""
    relative_positions: int | None = None
    """Side, in patches, of the map that the global blocks' relative positions are made for (windowed blocks have theirs
    too); None for none."""


_POOLINGS = ("token", "mean", "mean_norm")


@BACKBONES.register
class ViT(BackboneBase):
    """ViT: one map at the patch's stride, "res4" for patches of 16 (res{log2 stride}). timm's and DeiT's weights fit.

    A plain map serves heads that want several levels through the neck `SimpleFeaturePyramid`.

    Args:
        image_size: side or (height, width) in pixels that the position embeddings are made for. They are resampled to
            images of other sizes, and from weights of other sizes.
        class_token: adds a class token; None: unless `window_size` is set.
        distilled: adds a distillation token with its own head; logits are the mean of both.
        num_registers: register tokens, which have no position.
        pooling: what a classifier reads: "token", the class token; "mean", the mean of the normalised patches (Beyer
            et al. 2022, https://arxiv.org/abs/2205.01580); "mean_norm", the normalised mean of the patches (MAE).
        settings: see `BackboneSettings`; pretrained=True means DeiT's or torchvision's ImageNet weights.
    Raises:
        ConfigError: an argument is impossible, or two contradict each other.
    """

    class_head = ("head.", "head_dist.")
    optional_weights = ("*.rel_pos_h", "*.rel_pos_w", "fc_norm.*")

    def __init__(
        self,
        sizes: ViTSizes = ViTSizes(),
        *,
        image_size: int | tuple[int, int] = 224,
        class_token: bool | None = None,
        distilled: bool = False,
        num_registers: int = 0,
        pooling: Literal["token", "mean", "mean_norm"] = "token",
        windows: WindowSettings = WindowSettings(),
        settings: BackboneSettings = BackboneSettings(),
    ):
        super().__init__()
        sizes.check("ViT")
        patch_size, d_model = sizes.patch_size, sizes.d_model
        window_size, relative_positions = windows.window_size, windows.relative_positions
        class_token = window_size is None if class_token is None else class_token
        _check_tokens(class_token, distilled, num_registers, pooling if settings.num_classes is not None else None)
        if (window_size is not None or relative_positions is not None) and (class_token or num_registers):
            raise ConfigError(
                "ViT: windows and relative positions are of patches: set class_token=False, num_registers=0."
            )
        global_blocks = _choose_global_blocks(sizes.depth, window_size, windows.global_blocks)
        self.configure(settings, sizes.feature_info())
        self.pooling = pooling
        self.antialias = window_size is None

        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.grid = (math.ceil(height / patch_size), math.ceil(width / patch_size))
        if min(self.grid) < 1:
            raise ConfigError(f"ViT: image_size={image_size}: expected at least 1 pixel.")
        self.num_registers = num_registers
        self.num_positioned = int(class_token) + int(distilled)
        self.patch_embed = PatchEmbedding(patch_size, d_model)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d_model)) if class_token else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, d_model)) if distilled else None
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, d_model)) if num_registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_positioned + math.prod(self.grid), d_model))

        def attention(i: int) -> Attention:
            window = None if i in global_blocks else window_size
            relative = None if relative_positions is None else window or relative_positions
            return Attention(d_model, sizes.num_heads, window_size=window, relative_positions=relative)

        self.blocks = nn.ModuleList(
            Block(d_model, attention(i), d_mlp=int(d_model * sizes.mlp_ratio), drop_path=rate)
            for i, rate in enumerate(drop_path_rates("ViT", settings.drop_path, sizes.depth))
        )
        if self.is_classifier:
            norm = "fc_norm" if pooling == "mean_norm" else "norm"
            setattr(self, norm, nn.LayerNorm(d_model, eps=1e-6))
            self.head = nn.Linear(d_model, settings.num_classes)
            self.head_dist = nn.Linear(d_model, settings.num_classes) if distilled else None
        else:
            self.norm = nn.Identity() if window_size is not None else nn.LayerNorm(d_model, eps=1e-6)
        self._initialize()
        self.freeze()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for tokens in (self.pos_embed, self.cls_token, self.dist_token, self.reg_token):
            if tokens is not None:
                nn.init.trunc_normal_(tokens, std=0.02)

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """List the embeddings, then each block."""
        tokens = [t for t in (self.pos_embed, self.cls_token, self.dist_token, self.reg_token) if t is not None]
        return [[self.patch_embed, *tokens], *([block] for block in self.blocks)]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the map, or a classifier's logits, of images from one patch upwards."""
        check_images("ViT", images, least=self.patch_embed.patch_size)
        x = self.patch_embed(images)
        size = (x.shape[-2], x.shape[-1])
        x = self.embed(x.flatten(2).transpose(1, 2), size)
        for block in self.blocks:
            x = checkpoint_block(block, x, size)
        if self.is_classifier:
            return self.classify(x)
        x = self.norm(x[:, self.num_positioned + self.num_registers :])
        return {name: x.transpose(1, 2).unflatten(2, size) for name in self.feature_info}

    def embed(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Add positions and put the other tokens before the patches: (B, h * w, d_model) -> (B, L, d_model)."""
        count = self.num_positioned
        patches = add(
            patches, resize_positions_2d(self.pos_embed[:, count:], self.grid, size, antialias=self.antialias)
        )
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        tokens = [torch.cat(tokens, dim=1) + self.pos_embed[:, :count]] if tokens else []
        tokens += [] if self.reg_token is None else [self.reg_token]
        if not tokens:
            return patches.contiguous()
        return torch.cat([*(token.expand(len(patches), -1, -1) for token in tokens), patches], dim=1)

    def classify(self, x: Tensor) -> Tensor:
        """Classify by the class token or the pooled patches: (B, L, d_model) -> (B, num_classes)."""
        patches = self.num_positioned + self.num_registers
        if self.pooling == "mean":
            return self.head(self.norm(x[:, patches:]).mean(dim=1))
        if self.pooling == "mean_norm":
            return self.head(self.fc_norm(x[:, patches:].mean(dim=1)))
        x = self.norm(x[:, : self.num_positioned])
        if self.head_dist is None:
            return self.head(x[:, 0])
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Fit positions of another image size or other tokens, DINOv2's layer scale and its names."""
        state.pop(f"{prefix}mask_token", None)
        if f"{prefix}register_tokens" in state:
            state[f"{prefix}reg_token"] = state.pop(f"{prefix}register_tokens")
        for i in range(len(self.blocks)):
            for scale, layer in (("ls1", "attn.proj"), ("ls2", "mlp.fc2")):
                _fold_scale(state, f"{prefix}blocks.{i}.{scale}.gamma", f"{prefix}blocks.{i}.{layer}")
        key = f"{prefix}pos_embed"
        if key in state and state[key].shape != self.pos_embed.shape and state[key].ndim == 3:
            self._adapt_positions(state, key, f"{prefix}reg_token")

    def _adapt_positions(self, state: dict[str, Tensor], key: str, registers: str) -> None:
        """Fit positions to this grid; a token without one gets zeros, and a register has its position added to it."""
        table = state[key]
        num_others, grid = self._split_positions(table.shape[1], key)
        patches = resize_positions_2d(table[:, num_others:], grid, self.grid, antialias=self.antialias)
        others = table[:, :num_others]
        tokens, register_positions = others[:, : self.num_positioned], others[:, self.num_positioned :]
        if register_positions.shape[1] == self.num_registers > 0 and registers in state:
            state[registers] = state[registers] + register_positions
        missing = table.new_zeros(1, self.num_positioned - tokens.shape[1], table.shape[2])
        state[key] = torch.cat((tokens, missing, patches), dim=1)

    def _split_positions(self, length: int, key: str) -> tuple[int, tuple[int, int]]:
        """Return how many positions are of tokens other than patches, and the grid of the patches."""
        counts = (self.num_positioned, 0, 1, 2, self.num_positioned + self.num_registers)
        for count in counts:
            if length - count == math.prod(self.grid):
                return count, self.grid
        for count in counts:
            side = math.isqrt(max(length - count, 0))
            if side and side**2 == length - count:
                return count, (side, side)
        raise CheckpointError(
            f"{key}: {length} positions do not fit a square image. Build the model with the checkpoint's image_size "
            f"(this one's grid is {self.grid[0]} x {self.grid[1]} patches); it still takes images of any size."
        )

    def _address(self) -> str:
        width, patch = self.pos_embed.shape[-1], self.patch_embed.patch_size
        shape = dict(d_model=width, depth=len(self.blocks), num_heads=self.blocks[0].attn.num_heads)
        name = next((n for n, size in _SIZES.items() if size == shape), None)
        deit = f"{name}_distilled" if self.dist_token is not None else name
        if name and patch == 16 and deit in _DEIT_CHECKSUMS:
            return _DEIT.format(deit, _DEIT_CHECKSUMS[deit], _DEIT_CHECKSUMS[deit])
        if name and (width, patch) in _TORCHVISION:
            model, weights = _TORCHVISION[width, patch]
            url = get_model_weights(model)[weights].url
            return f"{url}#sha256={Path(url).stem.split('-')[1]}"
        return super()._address()


def _fold_scale(state: dict[str, Tensor], key: str, layer: str) -> None:
    """Multiply a branch's last layer by the scale that was learned for its output."""
    scale = state.pop(key, None)
    if scale is not None:
        state[f"{layer}.weight"] = state[f"{layer}.weight"] * scale[:, None]
        state[f"{layer}.bias"] = state[f"{layer}.bias"] * scale


def _check_tokens(class_token: bool, distilled: bool, num_registers: int, pooling: str | None) -> None:
    """`pooling` is None where nothing is pooled."""
    if num_registers < 0:
        raise ConfigError(f"ViT: num_registers={num_registers}: expected 0 or more.")
    if distilled and not class_token:
        raise ConfigError("ViT: a distillation token stands beside a class token: set class_token=True.")
    if pooling is None:
        return
    if pooling not in _POOLINGS:
        raise ConfigError(f"ViT: unknown pooling {pooling!r}. {nearest(pooling, _POOLINGS)}")
    if pooling == "token" and not class_token:
        raise ConfigError("ViT: pooling='token' needs the class token: set class_token=True or pooling='mean'.")
    if distilled and pooling != "token":
        raise ConfigError(f"ViT: a distilled classifier reads its tokens: got pooling={pooling!r}, expected 'token'.")


def _choose_global_blocks(depth: int, window_size: int | None, global_blocks: Sequence[int] | None) -> set[int]:
    if window_size is None:
        if global_blocks is not None:
            raise ConfigError("ViT: without window_size all blocks are global: leave global_blocks out.")
        return set(range(depth))
    if window_size < 1:
        raise ConfigError(f"ViT: window_size={window_size}: expected at least 1, or None for no windows.")
    if global_blocks is None:
        return {depth * quarter // 4 - 1 for quarter in (1, 2, 3, 4)} - {-1}
    wrong = sorted(set(global_blocks) - set(range(depth)))
    if wrong:
        raise ConfigError(f"ViT: global_blocks {wrong}: expected indices of blocks, 0 to {depth - 1}.")
    return set(global_blocks)


BACKBONES.register_variants(ViT, VIT_VARIANTS)
