"""Building blocks of plain vision transformers: patch embedding, attention and transformer block.

Shapes: B batch, h x w patches, L tokens, the patches last, row by row.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vitkit.backbones.base import check_at_least_1
from vitkit.errors import ConfigError
from vitkit.kernels.linear import linear
from vitkit.nn.attention import attend
from vitkit.nn.layers import LayerScale, Linear, SwiGLU, TokenMLP
from vitkit.nn.vit_positions import rotate
from vitkit.ops.images import padding_to_multiple
from vitkit.protocols.backbone import Backbone
from vitkit.registry import nearest
from vitkit.structures import FeatureInfo


def check_sizes(*, patch_size: int, d_model: int, depth: int, num_heads: int) -> None:
    """Raise ConfigError if a size of a plain vision transformer is invalid."""
    check_at_least_1(patch_size=patch_size, d_model=d_model, depth=depth, num_heads=num_heads)
    if d_model % num_heads:
        raise ConfigError(f"num_heads={num_heads} must divide d_model={d_model}.")


def map_of_patches(patch_size: int, d_model: int) -> dict[str, FeatureInfo]:
    """Return the description of the only map of a plain vision transformer, res{log2 stride}."""
    return {f"res{round(math.log2(patch_size))}": FeatureInfo(d_model, patch_size)}


def add(branch: Tensor, x: Tensor) -> Tensor:
    """Return `x + branch`, in the branch's memory unless autocast is on, where the sum keeps full precision."""
    return branch.add_(x) if branch.dtype == x.dtype else branch + x


class PatchEmbedding(nn.Module):
    """Linear projection of patches of the image, or of the coarsest map of a stem.

    Raises:
        ConfigError: the stride of the stem's map does not divide the patch size.
    """

    def __init__(self, patch_size: int, d_model: int, stem: Backbone | None = None, in_channels: int = 3):
        super().__init__()
        self.patch_size = patch_size
        self.stem = stem
        name, info = list(stem.feature_info.items())[-1] if stem else ("image", FeatureInfo(in_channels, 1))
        if patch_size % info.stride:
            raise ConfigError(f"patch_size={patch_size}: expected a multiple of {info.stride}, the stem's stride.")
        self.name, side = name, patch_size // info.stride
        self.proj = nn.Conv2d(info.channels, d_model, kernel_size=side, stride=side)

    def forward(self, images: Tensor) -> Tensor:
        """Embed (B, C, H, W), zero-padded at the right and bottom to complete patches, as (B, d_model, h, w)."""
        height, width = images.shape[-2:]
        margins = (0, padding_to_multiple(width, self.patch_size), 0, padding_to_multiple(height, self.patch_size))
        images = F.pad(images, margins) if any(margins) else images
        return self.proj(images if self.stem is None else self.stem(images)[self.name])


class Attention(nn.Module):
    """Self-attention over all tokens.

    Args:
        qkv_bias: which of queries, keys and values have a bias: "qkv", "qv" or "none".
    Raises:
        ConfigError: `qkv_bias` is unknown.
    """

    window_size: int | None = None
    """Side, in patches, of the windows that it attends in; None: over all tokens."""

    def __init__(self, d_model: int, num_heads: int, *, qkv_bias: Literal["qkv", "qv", "none"] = "qkv"):
        super().__init__()
        if qkv_bias not in ("qkv", "qv", "none"):
            raise ConfigError(f"qkv_bias={qkv_bias!r}: expected 'qkv', 'qv' or 'none'.")
        self.num_heads = num_heads
        self.qkv = Linear(d_model, 3 * d_model, bias=qkv_bias == "qkv")
        self.q_bias = nn.Parameter(torch.zeros(d_model)) if qkv_bias == "qv" else None
        self.v_bias = nn.Parameter(torch.zeros(d_model)) if qkv_bias == "qv" else None
        self.proj = Linear(d_model, d_model)

    def forward(
        self,
        x: Tensor,
        size: tuple[int, int] | None = None,
        rotations: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, L, d_model).
            size: (h, w) of the patches, which attention over all tokens does not need.
            rotations: (2, L, d) for all tokens, see `rotate`.
            bias: float, broadcastable to (B, heads, L, L), added to the scores.
        """
        q, k, v = self.project(x)
        if rotations is not None:
            q, k = rotate(q, rotations), rotate(k, rotations)
        return self.proj(attend(q, k, v, bias).transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> list[Tensor]:
        """Project to queries, keys and values: (B, L, d_model) -> three of (B, heads, L, d)."""
        if self.q_bias is None:
            projected = self.qkv(x)
        else:
            projected = linear(x, self.qkv.weight, torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias)))
        return [y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in projected.chunk(3, dim=-1)]

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert biases to those that this layer has: set those that weights lack to zero, and drop the keys' bias if
        this layer has none."""
        if f"{prefix}qkv.weight" not in state:
            return
        d_model = self.proj.in_features
        for name, size in {"qkv.bias": 3 * d_model, "q_bias": d_model, "v_bias": d_model}.items():
            if prefix + name in state and state[prefix + name].shape != (size,):
                return  # not of this layer, as the comparison with its shapes will say
        zeros = state[f"{prefix}qkv.weight"].new_zeros(d_model)
        state.pop(f"{prefix}qkv.bias_mask", None)  # DINOv3 masks the keys' bias
        if f"{prefix}qkv.bias" in state:
            q, k, v = state.pop(f"{prefix}qkv.bias").chunk(3)
        else:
            q, k, v = state.pop(f"{prefix}q_bias", zeros), zeros, state.pop(f"{prefix}v_bias", zeros)
        if self.qkv.bias is not None:
            state[f"{prefix}qkv.bias"] = torch.cat((q, k, v))
        elif self.q_bias is not None or q.any() or v.any():  # biases other than zero must not be dropped silently
            state[f"{prefix}q_bias"], state[f"{prefix}v_bias"] = q, v


_MLPS = {"gelu": TokenMLP, "swiglu": SwiGLU}


class Block(nn.Module):
    """Pre-norm transformer layer.

    Args:
        d_mlp: hidden width of the MLP.
        mlp: "gelu", or "swiglu": gated, where `d_mlp` is the gated width.
        drop_path: probability of being skipped in training.
        qkv_bias: see `Attention`.
        layer_scale: initial value of the branches' learned scales; None: no scales, and those in weights are merged
            into the preceding layers.
    Raises:
        ConfigError: `mlp` or `qkv_bias` is unknown.
    """

    activation_checkpointing = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_mlp: int,
        mlp: Literal["gelu", "swiglu"] = "gelu",
        drop_path: float = 0.0,
        qkv_bias: Literal["qkv", "qv", "none"] = "qkv",
        layer_scale: float | None = None,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        if mlp not in _MLPS:
            raise ConfigError(f"mlp={mlp!r}: unknown. {nearest(str(mlp), _MLPS)}")
        self.norm1 = nn.LayerNorm(d_model, eps=norm_eps)
        self.attn = Attention(d_model, num_heads, qkv_bias=qkv_bias)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(d_model, layer_scale)
        self.norm2 = nn.LayerNorm(d_model, eps=norm_eps)
        self.mlp = _MLPS[mlp](d_model, d_mlp)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(d_model, layer_scale)
        self.drop_path = StochasticDepth(drop_path, "row")

    def forward(
        self, x: Tensor, size: tuple[int, int], rotations: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """(B, L, d_model) -> (B, L, d_model); see `Attention`."""
        x = add(self.drop_path(self.ls1(self.attn(self.norm1(x), size, rotations, bias))), x)
        return add(self.drop_path(self.ls2(self.mlp(self.norm2(x)))), x)

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Convert timm's other name for the layer scale; if the block has none, merge it into the preceding layer."""
        for theirs, ours, layer in (("gamma_1", "ls1", "attn.proj"), ("gamma_2", "ls2", "mlp.fc2")):
            key = f"{prefix}{ours}.gamma"
            if f"{prefix}{theirs}" in state:
                state[key] = state.pop(f"{prefix}{theirs}")
            if key in state and not isinstance(getattr(self, ours), LayerScale):
                scale = state.pop(key)
                state[f"{prefix}{layer}.weight"] = state[f"{prefix}{layer}.weight"] * scale[:, None]
                state[f"{prefix}{layer}.bias"] = state[f"{prefix}{layer}.bias"] * scale
