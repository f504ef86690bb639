"""Scaled dot-product attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), step by step.

Shapes: B batch, L queries, S keys, d channels per head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the same as `attend`, and the weights; slower, and with all weights in memory.

    Returns:
        output: (B, heads, L, d_v).
        weights: (B, heads, L, S) float32, before dropout; each row sums to 1.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores += bias  # in place: the scores of small windows are the largest tensors in a step
    weights = attention_weights(scores)
    return F.dropout(weights, dropout_p).to(v.dtype) @ v, weights


def attention_weights(scores: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the softmax of scores plus bias over the keys, in float32 or higher precision.

    Args:
        scores: (..., S).
        bias: broadcastable to `scores`.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return torch.softmax(scores if bias is None else scores + bias, dim=-1)
