"""Linear layers by the processor's fastest matrix product."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_SMALLEST = 2**20
"""Multiplications from which on the faster product pays for its longer call."""


class Linear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, in half its time on the processors that PyTorch's usual library for float32, MKL, serves badly.

    MKL uses half of the vector width of AMD's processors. oneDNN, which comes with PyTorch for convolutions, uses all.

    Args:
        x: (..., C).
        weight: (D, C).
        bias: (D,).
    Returns:
        (..., D).
    """
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # On rows, since what a Function returns must not be a view if it shall be changed in place.
        return _OneDnnLinear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    return _product(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    # Compilers and counters of operations know F.linear; autocast casts its arguments.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.is_autocast_enabled("cpu"):
        return False
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= _SMALLEST
        and x.numel() >= 8 * x.shape[-1]
        and _mkl_is_slow()
        and torch.backends.mkldnn.enabled
    )


@functools.cache
def _mkl_is_slow() -> bool:
    """Whether this is an AMD processor with AVX-512, whose time for a product was measured as 0.45 to 0.6 of MKL's."""
    processor = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor.exists()
        and "AuthenticAMD" in processor.read_text()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = _product(grad, weight.mT) if ctx.needs_input_grad[0] else None
        grad_weight = _product(rows.mT, x.flatten(0, -2).mT) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(dim=0) if ctx.needs_input_grad[2] else None
