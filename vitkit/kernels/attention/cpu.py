"""Attention with dropout that keeps one tensor of the weights' size."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.kernels.relu_dropout import draw_dropped


class AttendWithDropout(torch.autograd.Function):
    """Attention with dropout of the weights. The signs of what it keeps tell which weights were dropped."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, scale: float) -> Tensor:
        """Return the attended values; each saved weight's sign says whether it was dropped."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        q, k, v, weights = ctx.saved_tensors
        dropped_out = weights.clamp(min=0).mul_(ctx.gain)
        grad_v = dropped_out.mT @ grad
        # The softmax takes each row's mean off the gradient of all its scores, those of dropped weights included.
        grad_scores = (grad @ v.mT).mul_(dropped_out)
        grad_scores.addcmul_(weights.abs(), grad_scores.sum(-1, keepdim=True), value=-1).mul_(ctx.scale)
        return grad_scores @ k, grad_scores.mT @ q, grad_v, None, None, None
