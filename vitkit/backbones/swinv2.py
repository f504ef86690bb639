"""Swin Transformer V2 (Liu et al. 2021, https://arxiv.org/abs/2111.09883): cosine attention, a continuous position
bias, and norms at the end of each branch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.backbones.base import STAGES
from vitkit.backbones.swin import BASE, LARGE, SMALL, TINY, BaseWindowAttention, Swin, SwinBlock, merge_patches
from vitkit.errors import ConfigError
from vitkit.nn.attention import attend
from vitkit.nn.layers import Linear
from vitkit.nn.windows import relative_position_index
from vitkit.registry import BACKBONES

_WINDOW_8 = dict(window=8)
_WINDOW_12 = dict(window=12, trained_windows=(12, 12, 12, 6))
_WINDOW_16 = dict(window=16, trained_windows=(16, 16, 16, 8))
_WINDOW_12_TO_16 = dict(window=16, trained_windows=(12, 12, 12, 6))
_WINDOW_12_TO_24 = dict(window=24, trained_windows=(12, 12, 12, 6))

SWINV2_VARIANTS = {
    "swinv2_tiny": dict(**TINY, **_WINDOW_8),
    "swinv2_small": dict(**SMALL, **_WINDOW_8),
    "swinv2_base": dict(**BASE, **_WINDOW_8),
    "swinv2_tiny_window16": dict(**TINY, **_WINDOW_16),
    "swinv2_small_window16": dict(**SMALL, **_WINDOW_16),
    "swinv2_base_window16": dict(**BASE, **_WINDOW_16),
    "swinv2_base_window12": dict(**BASE | dict(drop_path=0.2), **_WINDOW_12),
    "swinv2_base_window12to16": dict(**BASE | dict(drop_path=0.2), **_WINDOW_12_TO_16),
    "swinv2_base_window12to24": dict(**BASE | dict(drop_path=0.2), **_WINDOW_12_TO_24),
    "swinv2_large_window12": dict(**LARGE, **_WINDOW_12),
    "swinv2_large_window12to16": dict(**LARGE, **_WINDOW_12_TO_16),
    "swinv2_large_window12to24": dict(**LARGE, **_WINDOW_12_TO_24),
}
"""The variants of the paper's section 3.6 and table 2; windows of 8 and 16 are for images of 256 pixels, windows of 12
for 192, and windows of 24 for 384."""

_WEIGHTS = {
    (96, 6, 8, 8): "v2.0.0/swinv2_tiny_patch4_window8_256",
    (96, 18, 8, 8): "v2.0.0/swinv2_small_patch4_window8_256",
    (128, 18, 8, 8): "v2.0.0/swinv2_base_patch4_window8_256",
    (96, 6, 16, 16): "v2.0.0/swinv2_tiny_patch4_window16_256",
    (96, 18, 16, 16): "v2.0.0/swinv2_small_patch4_window16_256",
    (128, 18, 16, 16): "v2.0.0/swinv2_base_patch4_window16_256",
    (128, 18, 12, 12): "v2.0.0/swinv2_base_patch4_window12_192_22k",
    (128, 18, 16, 12): "v2.0.0/swinv2_base_patch4_window12to16_192to256_22kto1k_ft",
    (128, 18, 24, 12): "v2.0.0/swinv2_base_patch4_window12to24_192to384_22kto1k_ft",
    (192, 18, 12, 12): "v2.0.0/swinv2_large_patch4_window12_192_22k",
    (192, 18, 16, 12): "v2.0.0/swinv2_large_patch4_window12to16_192to256_22kto1k_ft",
    (192, 18, 24, 12): "v2.0.0/swinv2_large_patch4_window12to24_192to384_22kto1k_ft",
}
"""Official weights by (width, blocks of the third stage, window, window that they were first trained with)."""

MAX_LOGIT_SCALE = math.log(100)
MAX_BIAS = 16
EPSILON = 1e-12


class CosineAttention(BaseWindowAttention):
    """Window attention by the cosine of queries and keys, with a learned temperature and a bias that a small network
    computes from the logarithm of the offset (sections 3.3 and 3.4).

    Attributes:
        trained_window: the window whose largest offset is the unit for offsets.
    """

    def __init__(self, d_model: int, num_heads: int, *, window: int):
        super().__init__(d_model, num_heads, qkv_bias=False)
        self.trained_window = window
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False))
        self.q_bias = nn.Parameter(torch.zeros(d_model))
        self.v_bias = nn.Parameter(torch.zeros(d_model))

    def position_bias(self, window: int) -> Tensor:
        device = self.logit_scale.device
        offsets = torch.arange(1 - window, window, device=device) * (8 / max(self.trained_window - 1, 1))
        offsets = (offsets.sign() * torch.log2(offsets.abs() + 1) / 3).to(self.logit_scale.dtype)
        pairs = torch.cartesian_prod(offsets, offsets)
        table = MAX_BIAS * torch.sigmoid(self.cpb_mlp(pairs))
        return table[relative_position_index(window, device)].permute(2, 0, 1).contiguous()

    def qkv_bias(self) -> Tensor:
        # A bias for keys would add the same constant to all scores of a query.
        return torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Attend by scaled cosine similarity, see `BaseWindowAttention.attend`."""
        scale = self.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()
        # In float16 the epsilon would become 0, and the keys of padding are 0.
        precision = torch.promote_types(q.dtype, torch.float32)
        q = q * (scale / q.to(precision).norm(dim=-1, keepdim=True).clamp(min=EPSILON))
        k = k * k.to(precision).norm(dim=-1, keepdim=True).clamp(min=EPSILON).reciprocal()
        return attend(q.to(v.dtype), k.to(v.dtype), v, bias, scale=1.0)


class SwinV2Block(SwinBlock):
    """Window attention, then the MLP, each followed by its norm."""

    attention = CosineAttention

    def forward(self, x: Tensor, window: int, shift: int, mask_bias: Tensor | None) -> Tensor:
        x = self.add(x, self.norm1(self.attn(x, window, shift, mask_bias)))
        return self.add(x, self.norm2(self.mlp(x)))


class PatchMergingV2(nn.Module):
    """Patch merging: 2 x 2 pixels become one with twice the channels, followed by the norm."""

    def __init__(self, d_model: int):
        super().__init__()
        self.reduction = Linear(4 * d_model, 2 * d_model, bias=False)
        self.norm = nn.LayerNorm(2 * d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, ceil(H / 2), ceil(W / 2), 2 * C)."""
        return self.norm(self.reduction(merge_patches(x)))


@BACKBONES.register
class SwinV2(Swin):
    """Swin Transformer V2: maps "res2" to "res5" at strides 4 to 32, or a classifier; loads official state dicts.

    Args:
        embed_dim: channels of res2, which double with each stage.
        depths: number of blocks in each stage.
        window: side of the windows, in pixels of the map.
        trained_windows: for each stage, the window whose largest offset is the unit for offsets: the one that the
            weights were first trained with, which is smaller than `window` where the map was; None: `window`.
        options: the other arguments of `Swin`.
    Raises:
        ConfigError: an argument is invalid.
    """

    weights = _WEIGHTS
    block = SwinV2Block
    merging = PatchMergingV2

    def __init__(
        self,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        *,
        window: int = 8,
        trained_windows: Sequence[int] | None = None,
        **options: Any,
    ):
        super().__init__(embed_dim, depths, window=window, **options)
        trained_windows = trained_windows or [window] * len(STAGES)
        if len(trained_windows) != len(STAGES) or min(trained_windows) < 1:
            raise ConfigError(f"trained_windows={list(trained_windows)}: expected one for each of 4 stages.")
        self.published = (*self.published, trained_windows[0])
        for layer, trained_window in zip(self.layers, trained_windows):
            for block in layer.blocks:
                block.attn.trained_window = trained_window
                # Initializing branches at zero makes deep networks train stably.
                nn.init.zeros_(block.norm1.weight)
                nn.init.zeros_(block.norm2.weight)


BACKBONES.register_variants(SwinV2, SWINV2_VARIANTS)
