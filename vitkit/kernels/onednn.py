"""Matrix products of linear layers by oneDNN, on processors for which PyTorch's default library is slow.

MKL, the default for float32, uses only half of the vector width of AMD's processors with AVX-512; oneDNN, which PyTorch
includes for convolutions, uses all of it. There, inference of ViT-B (224x224, batch 4) takes 0.84 of the time with
F.linear (one thread of a busy AMD EPYC with AVX-512, torch 2.14.1); on another one it took 0.54 of timm's time. On AMD
processors with only AVX2, MKL is faster: inference with oneDNN takes 1.05 of its time for a ViT-B, 1.07 for a Swin-T.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@functools.cache
def is_fast() -> bool:
    """Return whether this is an AMD processor with AVX-512, and PyTorch has oneDNN's product."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor.exists()
        and "AuthenticAMD" in processor.read_text()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear(x, weight, bias) in float32."""
    if torch.is_grad_enabled():
        # Applied to rows, since the output of a Function must not be a view if it is later modified in place.
        return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    return onednn_product(x, weight, bias)


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.mT + bias in float32, by a private PyTorch operator that has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """`onednn_product` for rows (N, C), with gradients by the same product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # For transposed rows with gaps between them, such as those of a chunk, oneDNN takes a hundred times as long.
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = onednn_product(grad, weight.mT) if ctx.needs_input_grad[0] else None
        grad_weight = onednn_product(grad.mT, x.mT) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(dim=0) if ctx.needs_input_grad[2] else None
