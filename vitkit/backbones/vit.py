"""Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929), with DeiT's distillation token
(Touvron et al. 2020, https://arxiv.org/abs/2012.12877), register tokens (Darcet et al. 2023,
https://arxiv.org/abs/2309.16588), and the changes of DINOv2 (Oquab et al. 2023, https://arxiv.org/abs/2304.07193) and
DINOv3 (Simeoni et al. 2025, https://arxiv.org/abs/2508.10104).

Shapes: B batch, h x w patches, L tokens (class, distillation and register tokens, then the patches row by row).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from timm.layers import resample_patch_embed
from torch import Tensor, nn
from torchvision.models import get_model_weights

from vitkit.backbones.base import BackboneBase, check_keys, drop_path_rates, init_linear
from vitkit.backbones.vit_blocks import Block, PatchEmbedding, add, check_sizes, map_of_patches
from vitkit.errors import CheckpointError, ConfigError
from vitkit.nn.layers import SwiGLU
from vitkit.nn.vit_positions import (
    mae_positions,
    pad_rotations,
    resize_positions_1d,
    resize_positions_2d,
    rotary_positions_2d,
)
from vitkit.ops.images import check_images, in_channels
from vitkit.registry import BACKBONES, nearest
from vitkit.structures import FeatureInfo

VIT_SIZES = {
    "tiny": dict(d_model=192, depth=12, num_heads=3),
    "small": dict(d_model=384, depth=12, num_heads=6),
    "base": dict(d_model=768, depth=12, num_heads=12),
    "large": dict(d_model=1024, depth=24, num_heads=16),
    "huge": dict(d_model=1280, depth=32, num_heads=16),
}
_GIANT = dict(d_model=1536, depth=40, num_heads=24, mlp_ratio=8 / 3, mlp="swiglu")
_DINO = "https://dl.fbaipublicfiles.com/dino/dino_{0}_pretrain/dino_{0}_pretrain.pth"
_DINO_NAMES = {
    ("small", 8): "deitsmall8",
    ("small", 16): "deitsmall16",
    ("base", 8): "vitbase8",
    ("base", 16): "vitbase16",
}
_DINOV2_SIZES = {**{n: VIT_SIZES[n] for n in ("small", "base", "large")}, "giant": _GIANT}
_DINOV2 = dict(patch_size=14, image_size=518, blocks=dict(layer_scale=1e-5))
_REGISTERS = dict(num_registers=4, positions="patches")
_DINOV3_SIZES = {
    "small": VIT_SIZES["small"],
    "small_plus": dict(**VIT_SIZES["small"], mlp="swiglu"),
    "base": VIT_SIZES["base"],
    "large": VIT_SIZES["large"],
    "huge_plus": dict(d_model=1280, depth=32, num_heads=20, mlp="swiglu"),
    "7b": dict(d_model=4096, depth=40, num_heads=32, mlp_ratio=2, mlp="swiglu"),
}
_DINOV3 = dict(patch_size=16, image_size=256, num_registers=4, positions="rotary")
_DINOV3_BLOCKS = dict(layer_scale=1e-5, norm_eps=1e-5)

VIT_VARIANTS = {
    **{f"vit_{n}_patch{p}": dict(patch_size=p, **size) for n, size in VIT_SIZES.items() for p in (32, 16, 14)},
    **{f"deit_{n}_distilled_patch16": dict(distilled=True, **VIT_SIZES[n]) for n in ("tiny", "small", "base")},
    **{
        f"vit_{n}_patch{p}_dino": dict(
            patch_size=p, **VIT_SIZES[n], position_offset=0.1, default_weights=_DINO.format(name)
        )
        for (n, p), name in _DINO_NAMES.items()
    },
    **{f"vit_{n}_patch14_dinov2": dict(**size, **_DINOV2) for n, size in _DINOV2_SIZES.items()},
    **{f"vit_{n}_patch14_reg4_dinov2": dict(**size, **_DINOV2, **_REGISTERS) for n, size in _DINOV2_SIZES.items()},
    **{
        f"vit_{n}_patch16_dinov3": dict(**size, **_DINOV3, blocks=dict(**_DINOV3_BLOCKS, qkv_bias="none"))
        for n, size in _DINOV3_SIZES.items()
    },
    **{
        f"vit_{n}_patch16_dinov3_qkvb": dict(**size, **_DINOV3, blocks=dict(**_DINOV3_BLOCKS, qkv_bias="qv"))
        for n, size in _DINOV3_SIZES.items()
        if n != "7b"
    },
}
"""The variants of table 1 of the paper (B, L, H); table 1 of DeiT (Ti, S; distilled); table 1 of DINO (Caron et al.
2021, https://arxiv.org/abs/2104.14294), whose weights have no published checksum; table 17 of DINOv2, with and without
registers; tables 2 and 3 of DINOv3, without the biases that are zero in the published weights, and with them (qkvb).
Names are timm's, except for DINO's. A dict in a spec, such as `blocks`, replaces the
variant's."""

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
"""Published weights trained on images that are normalized as in vitkit, by (width, patch size)."""

_POOLINGS = ("token", "mean", "mean_norm")
_POSITIONS = ("all", "patches", "axes", "sincos", "rotary", "none")


class BlockOptions(TypedDict, total=False):
    """The changes of DINOv2 and DINOv3 in the blocks; see `Block`."""

    qkv_bias: Literal["qkv", "qv", "none"]
    layer_scale: float | None
    norm_eps: float


class ClassifierOptions(TypedDict, total=False):
    """Options of a classifier: pooling, hidden layer and initial weights; ignored without `num_classes`."""

    pooling: Literal["token", "mean", "mean_norm"]
    """"token" (the default): the class token; "mean": the mean of the normalized patches (Beyer et al. 2022,
    https://arxiv.org/abs/2205.01580); "mean_norm": the normalized mean of the patches (MAE)."""
    hidden_layer: bool
    """Whether there is a hidden layer with tanh, as in ViT's pre-training (section 3.1); default False."""
    head_std: float
    """Standard deviation of the head's initial weights; default 0.02. Recipes of fine-tuning begin with much less."""


class Tokens(NamedTuple):
    """The tokens between two blocks."""

    x: Tensor
    """(B, L, d_model)."""
    size: tuple[int, int]
    """(h, w) of the patches, which come last."""
    rotations: Tensor | None
    """(2, L, d), rotations of queries and keys, or (2, B, 1, L, d), those of each image; None unless positions are
    "rotary"."""


@BACKBONES.register
class ViT(BackboneBase):
    """ViT: one map at the patch's stride, "res4" for patches of 16 (res{log2 stride}). Loads timm's and DeiT's weights.

    For heads that need several levels, use the neck `SimpleFeaturePyramid`.

    Args:
        patch_size: side of the patches, in pixels; 1 makes a transformer on pixels.
        d_model: width of the tokens, a multiple of `num_heads`.
        depth: number of blocks.
        mlp_ratio: hidden width of each block's MLP, relative to `d_model`.
        mlp: "gelu", or "swiglu": gated, where `mlp_ratio` is that of the gated width.
        image_size: side or (height, width), in pixels, that the position embeddings are made for. They are resampled
            for images of other sizes, and when loading weights for other sizes; the patch projection is resampled
            likewise.
        positions: learned positions of patches, class and distillation token ("all"), or only of patches ("patches",
            as in DINOv2 with registers); learned positions of a patch's row and column, with half of the channels each
            ("axes", ViT's "2-D" in table 8); fixed sines and cosines of a patch's column and row ("sincos", MAE), which
            are stored like those of "all"; rotations of the patches' queries and keys in every block ("rotary",
            DINOv3); or "none". For relative positions use `ViTDet`.
        position_offset: positions are resampled for other sizes as in DINO, which has 0.1: without antialiasing, as if
            there were this fraction of a patch more; 0: with antialiasing as in timm, or without it where the original
            has none: MAE's positions ("sincos"), and DeiT's with a distillation token.
        rotary_rescale: in training, the coordinates of "rotary" are multiplied by a log-uniform random factor between
            the inverse of this number and the number itself; DINOv3 was trained with 2.
        class_token: whether there is a class token.
        distilled: whether there is a distillation token with its own head; logits are then the mean of both heads.
        num_registers: number of register tokens, which have no position.
        blocks: see `BlockOptions`.
        classifier: see `ClassifierOptions`.
        stem: a backbone whose coarsest map is divided into patches instead of the image (the hybrid of section 3.1).
        default_weights: the weights that pretrained=True means, as a value of `pretrained`; None: DINOv2's, DINOv3's,
            DeiT's or torchvision's for a network of this shape.
        drop_path: see `drop_path_rates`.
        options: the arguments of `BackboneBase`.
    Raises:
        ConfigError: an argument is invalid, or arguments contradict each other.
    """

    class_head = ("head.", "head_dist.")
    input_weight = "patch_embed.proj.weight"
    classifier_parts = ("pre_logits.",)
    optional_weights = ("fc_norm.*",)
    attends_globally = True
    """Whether every block attends over all tokens by content, so that other tokens may be added."""
    antialias = True
    """Whether position embeddings are smoothed when they are resampled for a smaller map."""

    def __init__(
        self,
        patch_size: int = 16,
        d_model: int = 768,
        *,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        mlp: Literal["gelu", "swiglu"] = "gelu",
        image_size: int | tuple[int, int] = 224,
        positions: Literal["all", "patches", "axes", "sincos", "rotary", "none"] = "all",
        position_offset: float = 0.0,
        rotary_rescale: float = 1.0,
        class_token: bool = True,
        distilled: bool = False,
        num_registers: int = 0,
        blocks: BlockOptions | None = None,
        classifier: ClassifierOptions | None = None,
        stem: Mapping[str, Any] | None = None,
        default_weights: str | None = None,
        drop_path: float = 0.0,
        **options: Any,
    ):
        blocks, classifier = blocks or {}, classifier or {}
        check_keys("blocks", blocks, BlockOptions)
        check_keys("classifier", classifier, ClassifierOptions)
        check_sizes(patch_size=patch_size, d_model=d_model, depth=depth, num_heads=num_heads)
        if num_registers < 0:
            raise ConfigError(f"num_registers={num_registers}: expected 0 or more.")
        if positions not in _POSITIONS:
            raise ConfigError(f"positions={positions!r}: unknown. {nearest(str(positions), _POSITIONS)}")
        if not 0 <= position_offset < 1:
            raise ConfigError(f"position_offset={position_offset}: expected at least 0 and below 1, a part of a patch.")
        if positions == "sincos" and d_model % 4:
            raise ConfigError(f"positions='sincos': d_model={d_model} must be a multiple of 4.")
        if rotary_rescale < 1:
            raise ConfigError(f"rotary_rescale={rotary_rescale}: expected at least 1, where 1 means no rescaling.")
        if distilled and not class_token:
            raise ConfigError("distilled=True: a distillation token needs a class token. Set class_token=True.")
        super().__init__(self.maps(patch_size, d_model, depth), **options)
        self.pooling = classifier.get("pooling", "token")
        if self.is_classifier:
            _check_pooling(self.pooling, class_token=class_token, distilled=distilled)
        self.default_weights = default_weights
        self.depth = depth

        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        self.image_size = (height, width)
        self.grid = (math.ceil(height / patch_size), math.ceil(width / patch_size))
        if min(self.grid) < 1:
            raise ConfigError(f"image_size={image_size}: expected at least 1 pixel.")
        stem = BACKBONES.build(stem) if stem else None
        if stem and in_channels(stem) != self.in_channels:
            raise ConfigError(f"stem.in_channels={in_channels(stem)}: expected in_channels={self.in_channels}.")
        self.patch_embed = PatchEmbedding(patch_size, d_model, stem, self.in_channels)
        self.position_offset = position_offset
        self.antialias = self.antialias and not (position_offset or positions == "sincos" or distilled)
        self.rotary_rescale = rotary_rescale
        self._make_tokens(d_model, int(class_token), int(distilled), num_registers, positions)
        self.blocks = nn.ModuleList(
            Block(d_model, num_heads, d_mlp=int(d_model * mlp_ratio), mlp=mlp, drop_path=rate, **blocks)
            for rate in drop_path_rates(drop_path, depth)
        )
        norm_eps = self.blocks[-1].norm1.eps
        if self.is_classifier:
            norm = "fc_norm" if self.pooling == "mean_norm" else "norm"
            setattr(self, norm, nn.LayerNorm(d_model, eps=norm_eps))
            self.head = nn.Linear(d_model, self.num_classes)
            if classifier.get("hidden_layer", False):
                self.head = nn.Sequential(nn.Linear(d_model, d_model), nn.Tanh(), self.head)
            self.head_dist = nn.Linear(d_model, self.num_classes) if distilled else None
        else:
            self.norm = nn.LayerNorm(d_model, eps=norm_eps)
        self._initialize()
        if self.is_classifier and (std := classifier.get("head_std")) is not None:
            self._initialize_heads(std)
        self.freeze()

    def _make_tokens(
        self, d_model: int, num_class_tokens: int, num_distillation_tokens: int, num_registers: int, positions: str
    ) -> None:
        """Create the tokens other than patches, and the table of positions."""

        def parameter(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(1, count, d_model)) if count else None

        num_classifying = num_class_tokens + num_distillation_tokens
        self.num_registers = num_registers
        self.num_tokens = num_classifying + num_registers
        self.num_positioned = num_classifying if positions in ("all", "sincos") else 0
        self.cls_token = parameter(num_class_tokens)
        self.dist_token = parameter(num_distillation_tokens)
        self.reg_token = parameter(num_registers)
        self.has_rotations = positions == "rotary"
        self.row_embed = self.col_embed = None
        if positions == "sincos":
            table = mae_positions(self.grid, d_model, num_others=self.num_positioned)
            self.register_buffer("pos_embed", table)
        else:
            count = self.num_positioned + math.prod(self.grid)
            self.pos_embed = parameter(count) if positions in ("all", "patches") else None
        if positions == "axes":
            self.row_embed = nn.Parameter(0.02 * torch.randn(self.grid[0], d_model // 2))
            self.col_embed = nn.Parameter(0.02 * torch.randn(self.grid[1], d_model - d_model // 2))

    def _initialize(self) -> None:
        self.apply(init_linear)
        for tokens in (self.pos_embed, self.cls_token, self.dist_token, self.reg_token):
            if isinstance(tokens, nn.Parameter):
                nn.init.trunc_normal_(tokens, std=0.02)

    def _initialize_heads(self, std: float) -> None:
        if std < 0:
            raise ConfigError(f"classifier.head_std={std}: expected at least 0.")
        head = self.head[-1] if isinstance(self.head, nn.Sequential) else self.head
        for layer in (head, self.head_dist):
            if layer is not None:
                nn.init.trunc_normal_(layer.weight, std=std)

    @staticmethod
    def maps(patch_size: int, d_model: int, depth: int) -> dict[str, FeatureInfo]:
        """Return the description of all maps that the constructor's arguments give."""
        return map_of_patches(patch_size, d_model)

    @property
    def patch_size(self) -> int:
        """See `Backbone`."""
        return self.patch_embed.patch_size

    @property
    def has_class_token(self) -> bool:
        """See `Backbone`."""
        return self.cls_token is not None

    def global_attention(self) -> list[nn.Module]:
        """Return the attention of the blocks without windows."""
        return [block.attn for block in self.blocks if block.attn.window_size is None]

    def stages(self) -> list[list[nn.Module | nn.Parameter]]:
        """Return the embeddings, then each block."""
        tables = (self.pos_embed, self.row_embed, self.col_embed, self.cls_token, self.dist_token, self.reg_token)
        tokens = [table for table in tables if table is not None]
        return [[self.patch_embed, *tokens], *([block] for block in self.blocks)]

    def forward(self, images: Tensor) -> dict[str, Tensor] | Tensor:
        """Compute the map, or a classifier's logits, of images of at least one patch."""
        check_images("ViT", images, min_size=self.patch_embed.patch_size, in_channels=self.in_channels)
        x, size, _ = self.run_blocks(self.tokens(images))
        if self.is_classifier:
            return self.classify(x)
        x = self.norm(x[:, self.num_tokens :])
        return {name: x.transpose(1, 2).unflatten(2, size) for name in self.feature_info}

    def block_maps(self, images: Tensor, blocks: Sequence[int], *, norm: bool = True) -> list[Tensor]:
        """Return the map after each of several blocks, (B, d_model, h, w).

        Args:
            blocks: their indices from 0, ascending.
            norm: whether all maps go through the last norm.
        """
        check_images("ViT", images, min_size=self.patch_embed.patch_size, in_channels=self.in_channels)
        tokens, maps, start = self.tokens(images), [], 0
        for block in blocks:
            tokens, start = self.run_blocks(tokens, start, block + 1), block + 1
            x = tokens.x[:, self.num_tokens :]
            maps.append((self.norm(x) if norm else x).transpose(1, 2).unflatten(2, tokens.size))
        return maps

    def tokens(self, images: Tensor) -> Tokens:
        """Return the input of the first block."""
        x = self.patch_embed(images)
        size = (x.shape[-2], x.shape[-1])
        x = self.embed(x.flatten(2).transpose(1, 2), size)
        return Tokens(x, size, pad_rotations(self.rotations(size), self.num_tokens))

    def prepend(self, tokens: Tokens, extra_tokens: Tensor) -> Tokens:
        """Put more tokens, (N, d_model) and the same for all images, before the others.

        They take part in the blocks run from then on, without positions. Needs `attends_globally`.
        """
        x = torch.cat((extra_tokens.expand(tokens.x.shape[0], -1, -1), tokens.x), dim=1)
        return Tokens(x, tokens.size, pad_rotations(tokens.rotations, len(extra_tokens)))

    def keep(self, tokens: Tokens, patches: Tensor) -> Tokens:
        """Keep only some patches of each image, (B, K) int64 row by row, after the other tokens.

        The blocks run from then on see no others. Needs `attends_globally`.
        """
        others = torch.arange(self.num_tokens, device=patches.device).expand(len(patches), -1)
        indices = torch.cat((others, patches + self.num_tokens), dim=1)
        x = tokens.x.take_along_dim(indices[:, :, None], dim=1)
        rotations = None if tokens.rotations is None else tokens.rotations[:, indices].unsqueeze(2)
        return Tokens(x, tokens.size, rotations)

    def run_blocks(
        self, tokens: Tokens, start: int = 0, stop: int | None = None, *, bias: Tensor | None = None
    ) -> Tokens:
        """Run the blocks `start` up to `stop` (exclusive; None: to the last one).

        Args:
            tokens: from `tokens`, or an earlier call.
            bias: float, broadcastable to (B, heads, L, L), added to the attention scores of these blocks. Needs
                `attends_globally`.
        """
        x, size, rotations = tokens
        for block in list(self.blocks)[start:stop]:
            x = block(x, size, rotations, bias)
        return Tokens(x, size, rotations)

    def embed(self, patches: Tensor, size: tuple[int, int]) -> Tensor:
        """Add positions, and prepend the other tokens to the patches: (B, h * w, d_model) -> (B, L, d_model)."""
        count = self.num_positioned
        if self.pos_embed is not None:
            table = self.pos_embed[:, count:]
            patches = add(patches, self._resize_positions(table, self.grid, size))
        if self.row_embed is not None:
            rows = resize_positions_1d(self.row_embed, size[0])[:, None].expand(*size, -1)
            columns = resize_positions_1d(self.col_embed, size[1])[None].expand(*size, -1)
            patches = add(patches, torch.cat((rows, columns), dim=-1).flatten(0, 1)[None])
        tokens = [token for token in (self.cls_token, self.dist_token) if token is not None]
        if count:
            tokens = [torch.cat(tokens, dim=1) + self.pos_embed[:, :count]]
        tokens += [] if self.reg_token is None else [self.reg_token]
        if not tokens:
            return patches.contiguous()
        return torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in tokens), patches], dim=1)

    def _resize_positions(self, table: Tensor, grid: tuple[int, int], size: tuple[int, int]) -> Tensor:
        return resize_positions_2d(table, grid, size, antialias=self.antialias, offset=self.position_offset)

    def rotations(self, size: tuple[int, int]) -> Tensor | None:
        """Return the rotations of the patches' queries and keys, (2, h * w, d); None unless positions are "rotary"."""
        if not self.has_rotations:
            return None
        scale, weight = 1.0, self.patch_embed.proj.weight
        if self.training and self.rotary_rescale > 1:
            scale = self.rotary_rescale ** (2 * torch.rand((), device=weight.device) - 1)
        channels = len(weight) // self.blocks[0].attn.num_heads
        return rotary_positions_2d(size, channels, scale=scale, device=weight.device)

    def classify(self, x: Tensor) -> Tensor:
        """Classify by the class token or the pooled patches: (B, L, d_model) -> (B, num_classes)."""
        if self.pooling == "mean":
            return self.head(self.norm(x[:, self.num_tokens :]).mean(dim=1))
        if self.pooling == "mean_norm":
            return self.head(self.fc_norm(x[:, self.num_tokens :].mean(dim=1)))
        x = self.norm(x[:, : self.num_tokens - self.num_registers])
        if self.head_dist is None:
            return self.head(x[:, 0])
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2

    def separate_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return a distilled classifier's logits by the class token and by the distillation token, (B, num_classes)
        each, which learn from the labels and from a teacher."""
        x = self.norm(self.run_blocks(self.tokens(images)).x[:, :2])
        return self.head(x[:, 0]), self.head_dist(x[:, 1])

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert positions and patches of other sizes, positions of other tokens, and DINOv2's and DINOv3's names;
        leave out what these and MAE have for training only."""
        super().adapt_state(state, prefix)
        training_only = (f"{prefix}mask_token", f"{prefix}decoder_", f"{prefix}rope_embed.periods")
        for key in [key for key in state if key.startswith(training_only)]:
            del state[key]
        for name in ("register_tokens", "storage_tokens"):
            if f"{prefix}{name}" in state:
                state[f"{prefix}reg_token"] = state.pop(f"{prefix}{name}")
        key, weight = f"{prefix}patch_embed.proj.weight", self.patch_embed.proj.weight
        if key in state and state[key].ndim == 4 and state[key].shape[-2:] != weight.shape[-2:]:
            state[key] = resample_patch_embed(state[key], list(weight.shape[-2:]))
        key = f"{prefix}pos_embed"
        is_other = self.pos_embed is not None and key in state and state[key].shape != self.pos_embed.shape
        if is_other and state[key].ndim == 3:
            self._adapt_positions(state, prefix)

    def _adapt_positions(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert positions to this grid; if a token has none here, its position is added to the token; missing ones
        are zero."""
        key = f"{prefix}pos_embed"
        table = state[key]
        num_others, grid = self._split_positions(table.shape[1], key)
        patches = self._resize_positions(table[:, num_others:], grid, self.grid)
        others = table[:, :num_others]
        if self.num_positioned:
            tokens, rest = others[:, : self.num_positioned], others[:, self.num_positioned :]
            unpositioned = ["reg_token"]
        else:
            tokens, rest = others[:, :0], others
            unpositioned = ["cls_token", "dist_token", "reg_token"]
        for name in unpositioned:
            token = state.get(f"{prefix}{name}")
            if token is not None and rest.shape[1] >= token.shape[1]:
                state[f"{prefix}{name}"] = token + rest[:, : token.shape[1]]
                rest = rest[:, token.shape[1] :]
        missing = table.new_zeros(1, self.num_positioned - tokens.shape[1], table.shape[2])
        state[key] = torch.cat((tokens, missing, patches), dim=1)

    def _split_positions(self, length: int, key: str) -> tuple[int, tuple[int, int]]:
        """Return the number of positions of tokens other than patches, and the grid of the patches."""
        counts = (self.num_positioned, 0, 1, 2, self.num_tokens)
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

    def _url(self) -> str:
        if self.default_weights is not None:
            return self.default_weights
        width, patch = len(self.patch_embed.proj.weight), self.patch_embed.patch_size
        # By the depth of the network that the weights are for; a backbone may keep only its first blocks.
        shape = dict(d_model=width, depth=self.depth, num_heads=self.blocks[0].attn.num_heads)
        if not isinstance(self.blocks[0].ls1, nn.Identity):
            return self._dino_url(shape)
        if self.has_rotations:  # the others have learned positions
            return super()._url()
        name = next((n for n, size in VIT_SIZES.items() if size == shape), None)
        deit = f"{name}_distilled" if self.dist_token is not None else name
        if name and patch == 16 and deit in _DEIT_CHECKSUMS:
            return _DEIT.format(deit, _DEIT_CHECKSUMS[deit], _DEIT_CHECKSUMS[deit])
        if name and (width, patch) in _TORCHVISION:
            model, weights = _TORCHVISION[width, patch]
            url = get_model_weights(model)[weights].url
            return f"{url}#sha256={Path(url).stem.split('-')[1]}"
        return super()._url()

    def _dino_url(self, shape: dict[str, int]) -> str:
        """Return timm's name for the weights that DINOv2 or DINOv3 published for a network of this shape."""
        is_v3 = self.has_rotations
        is_gated = isinstance(self.blocks[0].mlp, SwiGLU)
        for name, size in (_DINOV3_SIZES if is_v3 else _DINOV2_SIZES).items():
            if shape.items() <= size.items() and is_gated == ("mlp" in size):
                if is_v3:
                    return f"timm/vit_{name}_patch16_dinov3.lvd1689m"
                return f"timm/vit_{name}_patch14{'_reg4' if self.num_registers else ''}_dinov2.lvd142m"
        return super()._url()


def _check_pooling(pooling: str, *, class_token: bool, distilled: bool) -> None:
    """Raise ConfigError if a classifier cannot pool its tokens in this way."""
    if pooling not in _POOLINGS:
        raise ConfigError(f"classifier.pooling={pooling!r}: unknown. {nearest(str(pooling), _POOLINGS)}")
    if pooling == "token" and not class_token:
        raise ConfigError(
            "classifier.pooling='token' needs the class token. Set class_token=True or classifier.pooling='mean'."
        )
    if distilled and pooling != "token":
        raise ConfigError(
            f"classifier.pooling={pooling!r}: a distilled classifier reads its two tokens. Expected 'token'."
        )


BACKBONES.register_variants(ViT, VIT_VARIANTS)
