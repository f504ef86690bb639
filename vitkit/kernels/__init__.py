"""Operators with fast paths: VITKIT_KERNELS=plain runs every model with only the plain definitions; the default,
"fast", uses the fastest path for the device.

This file has the operators that torch defines (linear layers, dropout and attention), with what is faster than torch's
functions on a CPU. Operators that torch lacks have a folder each, whose `__init__` decides: there, `plain.py` is the
definition, and the other files are faster equivalents.

Times and memory below were measured on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.devices import processor_field
from vitkit.errors import ConfigError

CHOICES = ("fast", "plain")


# Read only once: operators ask at every call, and a look into the environment takes microseconds.
_choice = os.environ.get("VITKIT_KERNELS", "fast")


def plain_only() -> bool:
    """Return whether only the plain definitions may run: VITKIT_KERNELS=plain, or inside `use_kernels("plain")`.

    Raises:
        ConfigError: VITKIT_KERNELS has a value that is not in `CHOICES`.
    """
    if _choice not in CHOICES:
        raise ConfigError(f"VITKIT_KERNELS={_choice}: expected {' or '.join(CHOICES)}.")
    return _choice == "plain"


@contextmanager
def use_kernels(choice: str) -> Iterator[None]:
    """Run "plain" definitions or "fast" paths inside a `with` block, whatever the value of VITKIT_KERNELS."""
    global _choice
    assert choice in CHOICES
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def is_traced() -> bool:
    """Return whether torch.compile or torch.jit.trace is reading the code; they handle torch's own operators best."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with the processor's fastest matrix product.

    Args:
        x: (..., C).
        weight: (D, C).
        bias: (D,).
    Returns:
        (..., D).
    """
    if plain_only() or is_traced() or not _is_large_on_cpu(x, weight) or not onednn_is_fast():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # Applied to rows, since the output of a Function must not be a view if it is later modified in place.
        return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    return onednn_product(x, weight, bias)


def _is_large_on_cpu(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        # From this number of multiplications on, the faster product outweighs its larger overhead.
        and x.numel() * len(weight) >= 2**20
        and x.numel() >= 8 * x.shape[-1]
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")  # which converts the arguments of F.linear
    )


@functools.cache
def onednn_is_fast() -> bool:
    """Return whether this is an AMD processor with AVX-512, and PyTorch has oneDNN's product.

    MKL, PyTorch's default for float32, uses only half of the vector width of these processors; oneDNN, which PyTorch
    includes for convolutions, uses all of it. With it, inference of ViT-B (224x224, batch 4) takes 0.84 of the time; on
    another EPYC it took 0.54 of timm's time. On AMD processors with only AVX2, MKL is faster: inference with oneDNN
    takes 1.05 of its time for a ViT-B, 1.07 for a Swin-T.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor_field("vendor_id") == "AuthenticAMD"
    )


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


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """Compute F.dropout(F.relu(x), p)."""
    if plain_only() or is_traced():
        return F.dropout(F.relu(x), p)
    return ReluDropout.apply(x, p)


class ReluDropout(torch.autograd.Function):
    """ReLU, then dropout: the widest activations of a transformer are stored once instead of three times.

    A training step of Deformable DETR-R50 (480x640, batch 1) takes 0.79 of the peak memory (1179 rather than 1490 MiB)
    and 0.95 of the time; one of DETR-R50 (batch 2) takes 0.98 of the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Return the output, which is all that the backward pass needs."""
        output = _dropout_(x.relu(), p)
        # The output is positive exactly where a gradient passes through both, so the backward pass needs nothing else.
        ctx.save_for_backward(output)
        ctx.gain = 1 / (1 - p) if p < 1 else 0.0
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        (output,) = ctx.saved_tensors
        return (grad * ctx.gain).masked_fill_(output == 0, 0), None


def _dropout_(x: Tensor, p: float) -> Tensor:
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return x.masked_fill_(draw_dropped(x.shape, p), 0).mul_(1 / (1 - p) if p < 1 else 0.0)


def draw_dropped(shape: torch.Size, p: float) -> Tensor:
    """Draw which elements dropout drops: bool, on the CPU; p is rounded to a multiple of 1 / 65536."""
    # Four elements share one draw of 64 bits: drawing floats would take several times as long.
    draws = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return draws[: shape.numel()].view(shape) < round(p * 2**16) - 2**15


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
    is_precise = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype in (torch.float32, torch.float64)
    return is_precise and torch.is_grad_enabled() and not is_traced() and not torch.is_autocast_enabled("cpu")


class AttendWithDropout(torch.autograd.Function):
    """Attention with dropout of the weights, which are stored once instead of three times: their signs tell which were
    dropped.

    A training step of DETR-R50-DC5 (480x640, batch 1) takes 0.70 of the peak memory (1099 rather than 1571 MiB), one of
    DETR-R50 0.82 of it (800x1066, batch 1) and 0.98 of the time (480x640, batch 2).
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
