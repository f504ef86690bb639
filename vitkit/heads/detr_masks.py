"""DETR's mask head (Carion et al. 2020, section 4.4 and figure 8, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import attention_weights, mask_bias
from vitkit.nn.padding import extend_edges, group_norm, zero_padding


class BoxAttention(nn.Module):
    """Computes attention weights of each query on the encoded map, per head; there are no values."""

    def __init__(self, d_model: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        for linear in (self.q_linear, self.k_linear):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, queries: Tensor, memory: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the weights.

        Args:
            queries: (B, Q, d_model).
            memory: (B, d_model, h, w).
            padding_mask: (B, h, w) bool, True = padding.
        Returns:
            (B, Q, heads, h, w); the weights of all heads of a query sum to 1 together, as in the original.
        """
        size = memory.shape[-2:]
        q = self.q_linear(queries).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_linear(memory.flatten(2).transpose(1, 2)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, heads, Q, h * w)
        bias = None
        if padding_mask is not None:
            bias = mask_bias(padding_mask.flatten(1).repeat(1, self.num_heads))[:, None]
        weights = attention_weights(scores.transpose(1, 2).flatten(2), bias)
        return weights.to(memory.dtype).unflatten(2, (self.num_heads, *size))


class MaskConvHead(nn.Module):
    """Convolutions from the attention maps of each query up to stride 4, adding the backbone's maps on the way.

    Args:
        channels: channels of the first map: the transformer's width plus one for each head.
        context: the transformer's width; the layers' channels are fractions of it.
        feature_channels: channels of the backbone's maps, coarse to fine.
        num_groups: number of groups in the group norms.
    Raises:
        ConfigError: the groups do not divide the channels.
    """

    def __init__(self, channels: int, context: int, feature_channels: Sequence[int], *, num_groups: int = 8):
        super().__init__()
        widths = [channels, context // 2, context // 4, context // 8, context // 16]
        wrong = [width for width in widths if width % num_groups]
        if wrong:
            raise ConfigError(
                f"DETR's mask head: its {num_groups} groups must divide {widths} channels, but not {wrong}. Use a "
                "transformer with a d_model that is a multiple of 128, and num_heads=8."
            )
        self.lay1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.gn1 = nn.GroupNorm(num_groups, channels)
        for i, (a, b) in enumerate(pairwise(widths), start=2):
            setattr(self, f"lay{i}", nn.Conv2d(a, b, 3, padding=1))
            setattr(self, f"gn{i}", nn.GroupNorm(num_groups, b))
        self.out_lay = nn.Conv2d(widths[-1], 1, 3, padding=1)
        for i, (a, b) in enumerate(zip(feature_channels, widths[1:]), start=1):
            setattr(self, f"adapter{i}", nn.Conv2d(a, b, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                nn.init.zeros_(module.bias)

    def forward(
        self, image: Tensor, attention: Tensor, features: Sequence[Tensor], padding_mask: Tensor | None = None
    ) -> Tensor:
        """Predict a mask per query.

        Args:
            image: (B, d_model, h, w), the projected map that the transformer read.
            attention: (B, Q, heads, h, w).
            features: the backbone's three finer maps, coarse to fine, each (B, channels, H, W).
            padding_mask: (B, H', W') bool at the size of the images, True = padding, which is kept from affecting the
                image; None: padding is treated like the image, as in the original.
        Returns:
            (B, Q, H, W) logits at the finest map's size.
        """
        batch_size, num_queries = attention.shape[:2]
        padding = None if padding_mask is None else padding_mask.repeat_interleave(num_queries, dim=0)
        x = torch.cat([image.repeat_interleave(num_queries, dim=0), attention.flatten(0, 1)], dim=1)
        x = F.relu_(group_norm(self.lay1(zero_padding(x, padding)), padding, self.gn1))
        x = F.relu_(group_norm(self.lay2(zero_padding(x, padding)), padding, self.gn2))
        for i, feature in enumerate(features, start=1):
            layer, norm = self.get_submodule(f"lay{i + 2}"), self.get_submodule(f"gn{i + 2}")
            finer = self.get_submodule(f"adapter{i}")(feature).repeat_interleave(num_queries, dim=0)
            x = finer + F.interpolate(x, size=finer.shape[-2:], mode="nearest")
            x = F.relu_(group_norm(layer(zero_padding(x, padding)), padding, norm))
        masks = self.out_lay(zero_padding(x, padding))
        return extend_edges(masks, padding).view(batch_size, num_queries, *x.shape[-2:])
