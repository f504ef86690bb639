"""The masks of RF-DETR-Seg (Robinson et al. 2025, https://arxiv.org/abs/2511.09554)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.layers import TokenMLP
from vitkit.nn.padding import extend_edges, zero_padding
from vitkit.structures import FeatureInfo

MASK_STRIDE = 4
"""Stride of the masks, in pixels of the image."""


class MaskHead(nn.Module):
    """Multiplies the queries' states with an upsampled map, which a convolution block updates for each decoder layer.

    Args:
        feature_info: description of the only map.
        num_layers: number of decoder layers.
    Raises:
        ConfigError: there are several maps, or the map's stride is not a multiple of 4.
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], d_model: int, num_layers: int):
        super().__init__()
        strides = [info.stride for info in feature_info.values()]
        if len(strides) != 1 or strides[0] % MASK_STRIDE:
            raise ConfigError(
                f"RFDETRHead: masks=True needs a single map, with a stride divisible by {MASK_STRIDE}; the neck's maps "
                f"{', '.join(feature_info)} have strides {', '.join(map(str, strides))}."
            )
        self.scale = strides[0] // MASK_STRIDE
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
        first_states: Sequence[Tensor],
        padding_mask: Tensor | None,
    ) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the factors of all masks, see `_factors`.

        Args:
            features: the neck's only map, (B, d_model, h, w).
            states: those of the queries after each decoder layer, (B, Q, d_model).
            first_states: those of each group of queries before the decoder, whose masks are made from the unchanged
                map.
            padding_mask: (B, H, W) bool at the size of the images, True = padding, which affects no mask.
        """
        (x,) = features.values()
        height, width = x.shape[-2:]
        size = (self.scale * height, self.scale * width)
        x = F.interpolate(extend_edges(x, padding_mask), size=size, mode="bilinear", align_corners=False)
        unchanged = _with_ones(x)  # one tensor for all groups: matcher and losses read a map that sets share only once
        first, masks = [self._factors(unchanged, y) for y in first_states], []
        for block, y in zip(self.blocks, states):
            x = block(x, padding_mask)
            masks.append(self._factors(_with_ones(x), y))
        return masks, first

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
