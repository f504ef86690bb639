"""Operators with fast paths: VITKIT_KERNELS=plain runs every model with only the plain definitions; the default,
"fast", uses the fastest path for the device.

This file has the operators that torch defines, and decides when something faster than torch's function runs:
`onednn.py` for products, `dropout.py` for dropout on a CPU. Operators that torch lacks have a folder each, whose
`__init__` decides: there, `plain.py` is the definition, and the other files are faster equivalents.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.kernels import onednn
from vitkit.kernels.dropout import AttendWithDropout, ReluDropout

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
    if plain_only() or is_traced() or not _is_large_on_cpu(x, weight) or not onednn.is_fast():
        return F.linear(x, weight, bias)
    return onednn.linear(x, weight, bias)


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


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """Compute F.dropout(F.relu(x), p)."""
    if plain_only() or is_traced():
        return F.dropout(F.relu(x), p)
    return ReluDropout.apply(x, p)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute attention by torch's fused kernel or, in cases that it lacks on a CPU, faster than by its fallback.

    Arguments and result are those of `vitkit.nn.attention.attend`.
    """
    # A CPU's fused kernel has no gradient for a bias. With explicit products, a training step of Swin-T (480x640, batch
    # 1) takes 0.93 of the fallback's time, on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
    learns_bias = bias is not None and bias.requires_grad and q.device.type == "cpu" and not is_traced()
    if learns_bias or plain_only():
        return attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)[0]
    if bias is not None:
        bias = bias.to(q.dtype)
    if dropout_p and _drops_on_cpu(q, k, v):
        return AttendWithDropout.apply(q, k, v, bias, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
    if not dropout_p and _learns_in_bfloat16_on_cpu(q, k, v):
        # The fused kernel's backward pass is up to four times slower in bfloat16 than in float32. With float32, a step
        # of ViT-S (224x224, batch 4) takes 0.95 of the time and one of bccd/rt_detr (176x240, batch 4) 0.93, on one
        # thread of an AMD EPYC with AVX-512, torch 2.14.1.
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
