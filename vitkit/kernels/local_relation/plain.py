"""Local relation (Hu et al. 2019, https://arxiv.org/abs/1904.11491) with all windows materialized in memory.

Shapes: G groups of channels that share weights, (H, W) the map, (h, w) the output, L = h * w, k the side of the window,
n = k * k.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

OUTSIDE = -100.0
"""Similarity to a location outside the map. It still takes part in the softmax, with its geometry prior."""

SIMILARITIES = {
    "product": torch.mul,
    "key": lambda q, k: k.expand(torch.broadcast_shapes(q.shape, k.shape)),
    "difference": lambda q, k: -(q - k).abs(),
    "relative_difference": lambda q, k: -(q - k).abs() / (q.abs() + k.abs() + 1),
    "relative_square": lambda q, k: -(q - k).square() / ((q * k).abs() + 1),
    "square": lambda q, k: -(q - k).square(),
    "none": lambda q, k: torch.zeros_like(q * k),
}
"""The appearance term of one channel, in the order of the original's numbers 0 to 5; "none", only geometry, is its -1.
The paper compares "square", "difference" and "product"."""


def local_relation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Tensor,
    *,
    stride: int,
    dilation: int,
    scale: float,
    similarity: str,
) -> Tensor:
    """Aggregate each output's window: softmax weights from similarity and geometry prior, then the weighted sum."""
    weights = window_weights(query, key, prior, stride=stride, dilation=dilation, scale=scale, similarity=similarity)
    return window_sum(weights, value, stride=stride, dilation=dilation)


def window_weights(
    query: Tensor, key: Tensor, prior: Tensor, *, stride: int, dilation: int, scale: float, similarity: str
) -> Tensor:
    """Return the softmax over each output's window, (B, G, n, L), in float32 or higher precision."""
    return window_scores(query, key, prior, stride, dilation, scale, similarity).softmax(2)


def window_scores(
    query: Tensor, key: Tensor, prior: Tensor, stride: int, dilation: int, scale: float, similarity: str
) -> Tensor:
    """Return the similarity plus geometry prior of each location in an output's window, (B, G, n, L)."""
    num_groups, side, _ = prior.shape
    query, key, prior = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, prior))
    inside = unfold(torch.ones_like(key[:1, :1]), side, stride, dilation) > 0
    query = query.flatten(2).unflatten(1, (num_groups, -1))[:, :, :, None]
    key, saliency = unfold(key, side, stride, dilation).tensor_split([query.shape[1] * query.shape[2]], dim=1)
    scores = scale * SIMILARITIES[similarity](query, key.unflatten(1, (num_groups, -1))).sum(2)
    if saliency.shape[1]:
        groups = torch.arange(num_groups, device=key.device)
        scores = scores + query.shape[2] * saliency[:, groups * saliency.shape[1] // num_groups]
    return scores.where(inside, OUTSIDE) + prior.flatten(1)[:, :, None]


def window_sum(weights: Tensor, value: Tensor, *, stride: int, dilation: int) -> Tensor:
    """Return the weighted sum of each output's window, (B, G * channels, h, w); values are 0 outside of the map."""
    windows = unfold(value, int(weights.shape[2] ** 0.5), stride, dilation).unflatten(1, (weights.shape[1], -1))
    output = (windows * weights[:, :, None]).sum(3).to(value.dtype)
    return output.flatten(1, 2).unflatten(2, [-(-length // stride) for length in value.shape[2:]])


def unfold(x: Tensor, side: int, stride: int, dilation: int) -> Tensor:
    """Return the window of each output, whose center is location side // 2: (B, C, H, W) -> (B, C, n, L)."""
    before, after = dilation * (side // 2), dilation * ((side - 1) // 2)
    windows = F.unfold(F.pad(x, (before, after, before, after)), side, dilation=dilation, stride=stride)
    return windows.unflatten(1, (x.shape[1], side**2))
