"""Attention by torch's fused kernel, by faster paths for what that kernel lacks on a CPU, and step by step.

Times and memory were measured on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.kernels import is_traced, plain_only
from vitkit.kernels.linear import draw_dropped, without_autocast


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute attention by torch's fused kernel or, in cases that it lacks on a CPU, faster than by its fallback.

    Arguments and result are those of `vitkit.nn.attention.attend`.
    """
    # A CPU's fused kernel has no gradient for a bias. With explicit products, a training step of Swin-T (480x640, batch
    # 1) takes 0.93 of the fallback's time.
    learns_bias = bias is not None and bias.requires_grad and q.device.type == "cpu" and not is_traced()
    if learns_bias or plain_only():
        return attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)[0]
    if bias is not None:
        bias = bias.to(q.dtype)
    if dropout_p and _drops_on_cpu(q, k, v):
        with torch.autocast("cpu", enabled=False):
            return AttendWithDropout.apply(q, k, v, bias, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
    if not dropout_p and _learns_in_bfloat16_on_cpu(q, k, v):
        # The fused kernel's backward pass is up to four times slower in bfloat16 than in float32. With float32, a step
        # of ViT-S (224x224, batch 4) takes 0.95 of the time and one of bccd/rt_detr (176x240, batch 4) 0.93.
        bias = None if bias is None else bias.float()
        with torch.autocast("cpu", enabled=False):
            output = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias, dropout_p, scale=scale)
        return output.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def _learns_in_bfloat16_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    is_bfloat16 = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype == torch.bfloat16
    return is_bfloat16 and torch.is_grad_enabled() and not is_traced()


def _drops_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    dtype = q.dtype
    if q.device.type != "cpu" or not dtype == k.dtype == v.dtype or not torch.is_grad_enabled() or is_traced():
        return False
    # Autocast would convert the others.
    return dtype == torch.bfloat16 or (dtype.itemsize >= 4 and not torch.is_autocast_enabled("cpu"))


class AttendWithDropout(torch.autograd.Function):
    """Attention with dropout of the weights, which are stored once instead of three times: their signs tell which were
    dropped.

    A training step of DETR-R50-DC5 (480x640, batch 1) takes 0.70 of the peak memory (1099 rather than 1571 MiB), one of
    DETR-R50 0.82 of it (800x1066, batch 1) and 0.98 of the time (480x640, batch 2), in bfloat16 0.95 of the time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float) -> Tensor:
        """Return the attended values; the sign of each saved weight says whether it was dropped."""
        scores = (q * scale) @ k.mT
        if bias is not None:
            scores += bias
        weights = scores.softmax(-1)
        weights = torch.where(draw_dropped(weights.shape, p), -weights, weights)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale, ctx.gain = scale, 1 / (1 - p) if p < 1 else 0.0
        return weights.clamp(min=0).mul_(ctx.gain) @ v

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, weights = ctx.saved_tensors
        dropped_out = weights.clamp(min=0).mul_(ctx.gain)
        grad_v = dropped_out.mT @ grad
        # The softmax subtracts each row's mean from the gradients of all its scores, including those of dropped
        # weights.
        grad_scores = (grad @ v.mT).mul_(dropped_out)
        grad_scores.addcmul_(weights.abs(), grad_scores.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return grad_scores @ k, grad_scores.mT @ q, grad_v, None, None, None


def attend_explicit(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step: slower, and with all weights in memory.

    Returns:
        output: (B, heads, L, d_v).
        weights: (B, heads, L, S) float32, before dropout; each row sums to 1.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q * scale) @ k.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if bias is not None:
        scores += bias  # in place: the scores of small windows are the largest tensors in a step
    weights = scores.softmax(-1)
    return F.dropout(weights, dropout_p).to(v.dtype) @ v, weights
