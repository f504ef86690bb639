"""Masks of a decoder's queries: their embeddings times a map, of which only the factors are returned.

A part that is registered in MASK_HEADS is built with `feature_info`, `d_model` and `num_layers`, and called with the
maps, the states of the queries after each decoder layer, and the padding mask. It says by `initial` whether predictions
that a head makes before its first layer's refinement (D-FINE's) have the last layer's masks, and by `results` how its
masks are resized.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import MLP, TokenMLP
from vitkit.nn.mask_features import ConvGroupNorm
from vitkit.nn.padding import extend_edges, zero_padding
from vitkit.registry import MASK_HEADS
from vitkit.structures import FeatureInfo

MASK_STRIDE = 4
"""Stride of the masks, in pixels of the image."""


@MASK_HEADS.register
class BlockMasks(nn.Module):
    """The masks of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554) and ECSeg (2026,
    https://arxiv.org/abs/2603.18739): the finest map is enlarged, and a convolution block updates it for each decoder
    layer.

    Args:
        feature_info: description of the maps, fine to coarse; only the first is read.
        num_layers: number of decoder layers.
        one_block: whether only the first block is applied when not training, as ECSeg's code does: its published masks
            are those of the last layer's states with a map after one block. False: all blocks always.
        initial: whether predictions that a head makes before its first layer's refinement (D-FINE's) have the last
            layer's masks, as in ECSeg; False: none.
    Raises:
        ConfigError: the finest map's stride is not a multiple of 4.
    """

    results = "resized once"

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        d_model: int,
        num_layers: int,
        *,
        one_block: bool = False,
        initial: bool = False,
    ):
        super().__init__()
        finest = next(iter(feature_info.values()))
        if finest.stride % MASK_STRIDE:
            raise ConfigError(
                f"BlockMasks: the finest of the neck's maps, {', '.join(feature_info)}, has stride {finest.stride}: "
                f"expected a multiple of {MASK_STRIDE}."
            )
        same = finest.channels == d_model
        self.input_proj = nn.Identity() if same else nn.Conv2d(finest.channels, d_model, kernel_size=1)
        self.scale, self.one_block, self.initial = finest.stride // MASK_STRIDE, one_block, initial
        self.blocks = nn.ModuleList(DepthwiseBlock(d_model) for _ in range(num_layers))
        self.map_proj = nn.Conv2d(d_model, d_model, kernel_size=1)
        self.query_norm = nn.LayerNorm(d_model)
        self.query_mlp = TokenMLP(d_model, 4 * d_model)
        self.query_proj = nn.Linear(d_model, d_model)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(
        self,
        features: Mapping[str, Tensor],
        states: Sequence[Tensor],
        padding_mask: Tensor | None,
        first_states: Sequence[Tensor] = (),
    ) -> list[dict[str, Tensor]]:
        """Return the factors of the masks of the first stage, and of each layer, see `_factors`.

        Args:
            features: the maps, of which only the first is read, (B, _, h, w).
            states: those of the queries after each decoder layer, (B, Q, d_model).
            padding_mask: (B, H, W) bool at the size of the images, True = padding, which affects no mask.
            first_states: those of each group of queries before the decoder, whose masks are made from the unchanged
                map.
        """
        x = self.input_proj(next(iter(features.values())))
        height, width = x.shape[-2:]
        x = _resize(x, (self.scale * height, self.scale * width), padding_mask)
        if self.one_block and not self.training:
            return [*({} for _ in states[1:]), self._factors(_with_ones(self.blocks[0](x, padding_mask)), states[-1])]
        factors = []
        if first_states:
            unchanged = _with_ones(x)  # one tensor for all groups: matcher and losses read a shared map only once
            factors = [self._factors(unchanged, y) for y in first_states]
        for block, y in zip(self.blocks, states):
            x = block(x, padding_mask)
            factors.append(self._factors(_with_ones(x), y))
        return factors

    def _factors(self, features: Tensor, states: Tensor) -> dict[str, Tensor]:
        """Return mask_embed, (B, Q, d_model + 1), and mask_features, (B, d_model + 1, h, w), for `mask_logits`."""
        queries = self.query_proj(states + self.query_mlp(self.query_norm(states)))
        # The projection of the map is linear, and cheaper for the queries, of which there are fewer than pixels. The
        # last channel adds what does not depend on the pixel.
        embed = queries @ self.map_proj.weight.flatten(1)
        constant = (queries @ self.map_proj.bias)[..., None] + self.bias
        return {"mask_embed": torch.cat((embed, constant), dim=-1), "mask_features": features}


def _with_ones(x: Tensor) -> Tensor:
    """Append a channel of ones, (B, d_model, h, w) -> (B, d_model + 1, h, w)."""
    return torch.cat((x, torch.ones_like(x[:, :1])), dim=1)


class DepthwiseBlock(nn.Module):
    """A depthwise 3x3 convolution, layer norm, a 1x1 convolution and GELU, with a residual connection."""

    def __init__(self, channels: int):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pointwise = nn.Linear(channels, channels)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:
        """(B, channels, H, W) -> the same."""
        y = self.depthwise(zero_padding(x, padding_mask)).permute(0, 2, 3, 1)
        return x + F.gelu(self.pointwise(self.norm(y))).permute(0, 3, 1, 2)


class MaskPyramid(nn.Module):
    """Sums all maps of the encoder at the finest one's size, and enlarges the sum twice.

    Args:
        feature_info: description of the maps, fine to coarse.
        channels: those of the result, a multiple of 32.
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], channels: int):
        super().__init__()
        self.lateral = nn.ModuleList(
            ConvGroupNorm(info.channels, channels, 1, relu=False) for info in feature_info.values()
        )
        self.fusion = ConvGroupNorm(channels, channels, 3, relu=True)
        self.output = ConvGroupNorm(channels, channels, 3, relu=True)
        nn.init.kaiming_normal_(self.output[0].weight, mode="fan_out", nonlinearity="relu")

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None) -> Tensor:
        """(B, _, h, w) of each map -> (B, channels, 2 * h, 2 * w) at twice the finest map's size."""
        finest, *coarser = (
            project(x, padding_mask) for project, x in zip(self.lateral, features.values(), strict=True)
        )
        size = finest.shape[-2:]
        for x in coarser:
            finest = finest + _resize(x, size, padding_mask)
        x = self.fusion(finest, padding_mask)
        return self.output(_resize(x, (2 * size[0], 2 * size[1]), padding_mask), padding_mask)


def _resize(x: Tensor, size: tuple[int, int], padding_mask: Tensor | None) -> Tensor:
    return F.interpolate(extend_edges(x, padding_mask), size=size, mode="bilinear", align_corners=False)


@MASK_HEADS.register
class PyramidMasks(nn.Module):
    """The masks of D-FINE-seg (2026, https://arxiv.org/abs/2602.23043): one network for all decoder layers embeds the
    queries' states, and the map is made from all maps of the encoder.

    Args:
        feature_info: description of the maps, fine to coarse, the finest at stride 8.
        num_layers: number of decoder layers, which all have the same network.
        channels: those of the map, a multiple of 32.
    Raises:
        ConfigError: the finest map's stride is not 8.
    """

    initial = False
    results = "cut to boxes"

    def __init__(self, feature_info: Mapping[str, FeatureInfo], d_model: int, num_layers: int, *, channels: int = 256):
        super().__init__()
        name, finest = next(iter(feature_info.items()))
        if finest.stride != 8:
            raise ConfigError(
                f"PyramidMasks: the neck's finest map {name} has stride {finest.stride}: expected 8, since masks are "
                "predicted at twice its size."
            )
        self.pyramid = MaskPyramid(feature_info, channels)
        self.embed = MLP((d_model, d_model, d_model, channels))
        self.scale = channels**-0.5

    def forward(
        self, features: Mapping[str, Tensor], states: Sequence[Tensor], padding_mask: Tensor | None
    ) -> list[dict[str, Tensor]]:
        """Return the factors of the masks of each layer: mask_embed (B, Q, channels), and mask_features (B, channels,
        h, w), the same for all.

        Args:
            features: the encoder's maps, (B, _, h, w).
            states: those of the queries after each decoder layer, (B, Q, d_model).
            padding_mask: (B, H, W) bool at the size of the images, True = padding.
        """
        maps = self.pyramid(features, padding_mask)
        return [{"mask_embed": self.scale * self.embed(x), "mask_features": maps} for x in states]
