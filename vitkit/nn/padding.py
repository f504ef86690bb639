"""Keeps padding from affecting an image in convolutions, norms and resizing.

Maps are (B, C, H, W). A padding mask is (B, H', W') bool of any size, True = padding, which is resized to the map's;
with None, padding is treated like the image, as in the original models.
"""

import torch
from torch import Tensor, nn

from vitkit.ops.images import resize_mask


def zero_padding(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Set padding to zero, for kernels that extend beyond an image's border."""
    return x if padding_mask is None else x.masked_fill(resize_mask(padding_mask, x.shape[-2:])[:, None], 0)


def group_norm(x: Tensor, padding_mask: Tensor | None, norm: nn.GroupNorm) -> Tensor:
    """Return `norm(x)`, with statistics computed only over locations that are not padding."""
    if padding_mask is None:
        return norm(x)
    padding = resize_mask(padding_mask, x.shape[-2:])[:, None, None]  # (B, 1, 1, H, W)
    groups = x.float().unflatten(1, (norm.num_groups, -1))
    count = (~padding).sum((2, 3, 4), keepdim=True).clamp(min=1) * groups.shape[2]
    mean = groups.masked_fill(padding, 0).sum((2, 3, 4), keepdim=True) / count
    centered = (groups - mean).masked_fill(padding, 0)
    variance = centered.square().sum((2, 3, 4), keepdim=True) / count
    normalized = (centered * (variance + norm.eps).rsqrt()).flatten(1, 2)
    return (normalized * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)).to(x.dtype)


def extend_edges(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Repeat an image's last row and column in its padding."""
    if padding_mask is None:
        return x
    # Bilinear resizing then treats the edge of the image as it treats the border of a map.
    padding = resize_mask(padding_mask, x.shape[-2:])
    for dim, inside in ((2, ~padding.all(2)), (3, ~padding.all(1))):  # (B, H), (B, W)
        last = (inside.sum(1, keepdim=True) - 1).clamp(min=0)
        index = torch.arange(x.shape[dim], device=x.device).minimum(last)
        index = index[:, None, :, None] if dim == 2 else index[:, None, None, :]
        x = x.gather(dim, index.expand_as(x))
    return x
