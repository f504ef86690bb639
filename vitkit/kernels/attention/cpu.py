"""Attention with dropout that keeps only one tensor of the size of the weights for the backward pass."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.kernels.relu_dropout import draw_dropped


class AttendWithDropout(torch.autograd.Function):
    """Attention with dropout of the weights; the signs of the saved weights tell which were dropped."""

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
