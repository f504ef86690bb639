"""Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929), with DeiT's distillation token
(Touvron et al. 2020, https://arxiv.org/abs/2012.12877), register tokens (Darcet et al. 2023,
https://arxiv.org/abs/2309.16588) and ViTDet's windows (Li et al. 2022, https://arxiv.org/abs/2203.16527).

Shapes: B batch, h x w patches, L tokens (class, distillation and register tokens, then the patches row by row).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from torchvision.models import get_model_weights

from vitkit.backbones.base import Backbone, check_images, choose_features, drop_path_rates
from vitkit.errors import CheckpointError, ConfigError
from vitkit.nn.attention import attend
from vitkit.nn.layers import TokenMLP, run_block
from vitkit.nn.linear import Linear
from vitkit.nn.windows import WindowGrid
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
    """`x + branch`, in the branch's memory; under autocast in a new one, so that the sum keeps full precision."""
    return branch.add_(x) if branch.dtype == x.dtype else branch + x


def resample_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int], *, antialias: bool = True) -> Tensor:
    """Bicubic resampling of (1, h * w, C) position embeddings from one grid to another."""
    if old == new:
        return table
    grid = table.to(torch.promote_types(table.dtype, torch.float32)).unflatten(1, old).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", antialias=antialias)
    return grid.flatten(2).transpose(1, 2).to(table.dtype)


def resample_relative(table: Tensor, length: int) -> Tensor:
    """Linear resampling of (N, C) relative position embeddings to (length, C)."""
    if len(table) == length:
        return table
    return F.interpolate(table.T[None], size=length, mode="linear")[0].T


class PatchEmbedding(nn.Module):
    """Linear projection of patches."""

    def __init__(self, patch_size: int, d_model: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(3, d_model, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W), zero-padded at the right and bottom to whole patches, to (B, d_model, h, w)."""
        height, width = images.shape[-2:]
        margins = (0, -width % self.patch_size, 0, -height % self.patch_size)
        return self.proj(F.pad(images, margins) if any(margins) else images)


class Attention(nn.Module):
    """Self-attention of all tokens, or of each window's patches.

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
        """
        Args:
            x: (B, L, d_model); with windows or relative positions L = h * w.
            size: (h, w).
        """
        if self.window_size is None:
            return self._attend(x, size)
        # As in the original, windows over the border see zeros there, after the norm.
        windows = WindowGrid(*size, self.window_size)
        x = self._attend(windows.cut(x.unflatten(1, size)), (self.window_size, self.window_size))
        return windows.join(x).flatten(1, 2)

    def _attend(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if self.rel_pos_h is None:
            x = attend(q, k, v)
        else:
            # As channels of q and k the positions need no (heads, L, L) bias. The fused kernel wants v as wide.
            positions = self._relative_scores(q, size)
            q = torch.cat((q * q.shape[-1] ** -0.5, positions), dim=-1)
            k = torch.cat((k, _one_hot_places(size, k)), dim=-1)
            x = attend(q, k, F.pad(v, (0, positions.shape[-1])), scale=1.0)[..., : v.shape[-1]]
        return self.proj(x.transpose(1, 2).flatten(2))

    def _relative_scores(self, q: Tensor, size: tuple[int, int]) -> Tensor:
        """What each query adds to the scores of each row and each column: (B, heads, h * w, h + w)."""
        q = q.unflatten(2, size)
        rows = torch.einsum("bnhwc,hkc->bnhwk", q, _table(self.rel_pos_h, size[0]))
        columns = torch.einsum("bnhwc,wkc->bnhwk", q, _table(self.rel_pos_w, size[1]))
        return torch.cat((rows, columns), dim=-1).flatten(2, 3)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Resamples relative positions that were made for maps of another size."""
        for name in ("rel_pos_h", "rel_pos_w"):
            own, key = getattr(self, name), prefix + name
            if own is not None and key in state:
                state[key] = resample_relative(state[key], len(own))


def _table(relative: Tensor, length: int) -> Tensor:
    """(2 * length - 1, C), resampled if it is not so long, to (length, length, C): [query, key]."""
    places = torch.arange(length, device=relative.device)
    return resample_relative(relative, 2 * length - 1)[places[:, None] - places[None, :] + length - 1]


def _one_hot_places(size: tuple[int, int], k: Tensor) -> Tensor:
    """The row and the column of each key, one-hot: (B, heads, h * w, h + w), of the type of the keys."""
    height, width = size
    rows = torch.eye(height, dtype=k.dtype, device=k.device).repeat_interleave(width, dim=0)
    columns = torch.eye(width, dtype=k.dtype, device=k.device).repeat(height, 1)
    return torch.cat((rows, columns), dim=-1).expand(*k.shape[:2], -1, -1)


class Block(nn.Module):
    """Pre-norm transformer layer."""

    recompute = False

    def __init__(self, d_model: int, attention: Attention, *, d_mlp: int, drop_path: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.attn = attention
        self.norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.mlp = TokenMLP(d_model, d_mlp)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        x = add(self.drop_path(self.attn(self.norm1(x), size)), x)
        return add(self.drop_path(self.mlp(self.norm2(x))), x)


_POOLINGS = ("token", "mean", "mean_norm")


@BACKBONES.register
class ViT(Backbone):
    """One map at the patch's stride: "res4" for patches of 16 (res{log2 stride}); state dicts of timm and DeiT fit.

    A plain map serves heads that want several levels through the neck `SimpleFeaturePyramid`.

    Args:
        patch_size: in pixels; 1 is a transformer on pixels.
        d_model: width, a multiple of `num_heads`.
        mlp_ratio: hidden width of each block's MLP, in widths.
        image_size: side or (height, width) in pixels that the position embeddings are made for. They are resampled to
            images of other sizes, and from weights of other sizes.
        class_token: None: there is one unless `window_size` is set.
        distilled: a second, distillation token, with a head of its own; logits are the mean of both.
        num_registers: tokens without a position that only store.
        pooling: what a classifier reads: "token", the class token; "mean", the mean of the normalised patches (Beyer
            et al. 2022, https://arxiv.org/abs/2205.01580); "mean_norm", the normalised mean of the patches (MAE).
        window_size: ViTDet, for dense prediction: blocks attend in windows of so many patches a side, a few attend
            globally. There is then no class token, no norm after the last block, and, as in the original, no
            antialiasing when position embeddings are resampled.
        global_blocks: indices of the global blocks; None: the last of each quarter.
        relative_positions: side, in patches, of the map that the global blocks' relative positions are made for
            (windowed blocks have theirs too); None for none.
        out_features: the map's name, if at all.
        num_classes: makes it a classifier.
        frozen_stages: so many blocks, and the embeddings, are not trained.
        drop_path: rate of the last block; the first has 0.
        pretrained: as `Backbone` says; True: DeiT's or torchvision's ImageNet weights.
    Raises:
        ConfigError: an argument is none of these, or they contradict each other.
    """

    class_head = ("head.", "head_dist.")
    optional_weights = ("*.rel_pos_h", "*.rel_pos_w", "fc_norm.*")

    def __init__(
        self,
        patch_size: int = 16,
        *,
        d_model: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        image_size: int | tuple[int, int] = 224,
        class_token: bool | None = None,
        distilled: bool = False,
        num_registers: int = 0,
        pooling: Literal["token", "mean", "mean_norm"] = "token",
        window_size: int | None = None,
        global_blocks: Sequence[int] | None = None,
        relative_positions: int | None = None,
        out_features: Sequence[str] | None = None,
        num_classes: int | None = None,
        frozen_stages: int = 0,
        drop_path: float = 0.0,
        pretrained: bool | str = False,
    ):
        super().__init__()
        _check_sizes(patch_size, d_model, depth, num_heads)
        class_token = window_size is None if class_token is None else class_token
        _check_tokens(class_token, distilled, num_registers, pooling if num_classes is not None else None)
        if (window_size is not None or relative_positions is not None) and (class_token or num_registers):
            raise ConfigError(
                "ViT: windows and relative positions are of patches: set class_token=False, num_registers=0."
            )
        global_blocks = _choose_global_blocks(depth, window_size, global_blocks)
        available = {f"res{round(math.log2(patch_size))}": FeatureInfo(d_model, patch_size)}
        self.feature_info = choose_features("ViT", available, out_features, num_classes=num_classes)
        self.is_classifier = num_classes is not None
        self.pooling = pooling
        self.antialias = window_size is None
        self.pretrained = pretrained
        self.frozen_stages = frozen_stages

        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.grid = (math.ceil(height / patch_size), math.ceil(width / patch_size))
        if min(self.grid) < 1:
            raise ConfigError(f"ViT: image_size={image_size}: expected at least 1 pixel.")
        self.num_registers = num_registers
        self.num_placed = int(class_token) + int(distilled)
        self.patch_embed = PatchEmbedding(patch_size, d_model)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d_model)) if class_token else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, d_model)) if distilled else None
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, d_model)) if num_registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_placed + math.prod(self.grid), d_model))

        def attention(i: int) -> Attention:
            window = None if i in global_blocks else window_size
            relative = None if relative_positions is None else window or relative_positions
            return Attention(d_model, num_heads, window_size=window, relative_positions=relative)

        self.blocks = nn.ModuleList(
            Block(d_model, attention(i), d_mlp=int(d_model * mlp_ratio), drop_path=rate)
            for i, rate in enumerate(drop_path_rates("ViT", drop_path, depth))
        )
        if self.is_classifier:
            norm = "fc_norm" if pooling == "mean_norm" else "norm"
            setattr(self, norm, nn.LayerNorm(d_model, eps=1e-6))
            self.head = nn.Linear(d_model, num_classes)
            self.head_dist = nn.Linear(d_model, num_classes) if distilled else None
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
        """The embeddings, then each block."""
        tokens = [t for t in (self.pos_embed, self.cls_token, self.dist_token, self.reg_token) if t is not None]
        return [[self.patch_embed, *tokens], *([block] for block in self.blocks)]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """
        Args:
            images: (B, 3, H, W) float, normalised; any H and W from one patch upwards.
        Returns:
            the map, (B, d_model, ceil(H / patch_size), ceil(W / patch_size)), under its name; a classifier returns
            (B, num_classes) logits.
        Raises:
            DataError: the images are smaller than a patch, or not RGB.
        """
        check_images("ViT", images, least=self.patch_embed.patch_size)
        x = self.patch_embed(images)
        size = (x.shape[-2], x.shape[-1])
        x = self.embed(x.flatten(2).transpose(1, 2), size)
        for block in self.blocks:
            x = run_block(block, x, size)
        if self.is_classifier:
            return self.classify(x)
        x = self.norm(x[:, self.num_placed + self.num_registers :])
        return {name: x.transpose(1, 2).unflatten(2, size) for name in self.feature_info}

    def embed(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Adds positions and puts the other tokens before the patches: (B, h * w, d_model) to (B, L, d_model)."""
        placed, grid = self.pos_embed[:, : self.num_placed], self.pos_embed[:, self.num_placed :]
        patches = add(patches, resample_positions(grid, self.grid, size, antialias=self.antialias))
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        tokens = [torch.cat(tokens, dim=1) + placed] if tokens else []
        tokens += [] if self.reg_token is None else [self.reg_token]
        if not tokens:
            return patches.contiguous()
        return torch.cat([*(token.expand(len(patches), -1, -1) for token in tokens), patches], dim=1)

    def classify(self, x: Tensor) -> Tensor:
        """(B, L, d_model) to logits."""
        patches = self.num_placed + self.num_registers
        if self.pooling == "mean":
            return self.head(self.norm(x[:, patches:]).mean(dim=1))
        if self.pooling == "mean_norm":
            return self.head(self.fc_norm(x[:, patches:].mean(dim=1)))
        x = self.norm(x[:, : self.num_placed])
        if self.head_dist is None:
            return self.head(x[:, 0])
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Fits positions of another image size or other tokens, DINOv2's layer scale and its names."""
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
        """Fits positions to this grid; a token that had none has a position of zero, a register's is added to it."""
        table = state[key]
        others, old = self._split(table.shape[1], key)
        grid = resample_positions(table[:, others:], old, self.grid, antialias=self.antialias)
        given, spare = table[:, : min(others, self.num_placed)], table[:, self.num_placed : others]
        if spare.shape[1] and spare.shape[1] == self.num_registers and registers in state:
            state[registers] = state[registers] + spare
        missing = table.new_zeros(1, self.num_placed - given.shape[1], table.shape[2])
        state[key] = torch.cat((given, missing, grid), dim=1)

    def _split(self, length: int, key: str) -> tuple[int, tuple[int, int]]:
        """How many of the positions are of tokens other than patches, and the grid of the patches."""
        for others in (self.num_placed, 0, 1, 2, self.num_placed + self.num_registers):
            if length - others == math.prod(self.grid):
                return others, self.grid
        for others in (self.num_placed, 0, 1, 2, self.num_placed + self.num_registers):
            side = math.isqrt(max(length - others, 0))
            if side and side**2 == length - others:
                return others, (side, side)
        raise CheckpointError(
            f"{key}: {length} positions are of no square image. Build the model with the checkpoint's image_size "
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
    """Multiplies a branch's last layer by the factors that were learned for its output."""
    scale = state.pop(key, None)
    if scale is not None:
        state[f"{layer}.weight"] = state[f"{layer}.weight"] * scale[:, None]
        state[f"{layer}.bias"] = state[f"{layer}.bias"] * scale


def _check_sizes(patch_size: int, d_model: int, depth: int, num_heads: int) -> None:
    for name, value in dict(patch_size=patch_size, d_model=d_model, depth=depth, num_heads=num_heads).items():
        if value < 1:
            raise ConfigError(f"ViT: {name}={value}: expected at least 1.")
    if d_model % num_heads:
        raise ConfigError(f"ViT: num_heads={num_heads} must divide d_model={d_model}.")


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
