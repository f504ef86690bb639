"""Scaled dot-product attention: PyTorch's fused kernel, and faster alternatives for cases that it lacks on a CPU.

Dropout: PyTorch's fallback keeps three tensors of the size of the weights for the backward pass, `AttendWithDropout`
only one. A training step of DETR-R50-DC5 (480x640, batch 1) takes 0.70 of the peak memory (1099 rather than 1571 MiB),
one of DETR-R50 0.82 of it (800x1066, batch 1) and 0.98 of the time (480x640, batch 2).

Learned bias: with explicit products, a training step of Swin-T (480x640, batch 1) takes 0.93 of the fallback's time.

Measured on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.kernels import is_traced, plain_only
from vitkit.kernels.attention.cpu import AttendWithDropout
from vitkit.kernels.attention.plain import attend_explicit as attend_explicit
from vitkit.kernels.attention.plain import attention_weights as attention_weights


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute attention; arguments and result are those of `vitkit.nn.attention.attend`."""
    # A CPU's fused kernel has no gradient for a bias, and the fallback is slower than the explicit products.
    learns_bias = bias is not None and bias.requires_grad and q.device.type == "cpu" and not is_traced()
    if learns_bias or plain_only():
        return attend_explicit(q, k, v, bias, dropout_p=dropout_p, scale=scale)[0]
    if bias is not None:
        bias = bias.to(q.dtype)
    if dropout_p and _drops_on_cpu(q, k, v):
        return AttendWithDropout.apply(q, k, v, bias, dropout_p, q.shape[-1] ** -0.5 if scale is None else scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)


def _drops_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    is_precise = q.device.type == "cpu" and q.dtype == k.dtype == v.dtype in (torch.float32, torch.float64)
    return is_precise and torch.is_grad_enabled() and not is_traced() and not torch.is_autocast_enabled("cpu")
