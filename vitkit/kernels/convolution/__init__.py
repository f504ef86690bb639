"""A convolution whose weights no longer change, with its activation.

`plain.py` is the definition: it also runs in exports, in compiled models, under autocast, with gradients and on a GPU.
On an x86 CPU `onednn.py` keeps the weights in oneDNN's order, into which they are otherwise brought at every call, and
computes the activation while a result is in the cache: inference of a fused D-FINE-N (640x640, batch 1) takes 0.90 of
the time, RT-DETR-R50 0.94, RT-DETR-R18 0.95, D-FINE-S 0.96, on one thread of an AMD EPYC limited to AVX2, torch 2.14.1.
"""

import functools
from collections.abc import MutableMapping

import torch
from torch import Tensor

from vitkit.kernels import is_traced, plain_only
from vitkit.kernels.convolution import onednn, plain
from vitkit.kernels.convolution.plain import RELU, Activation, ConvSettings

__all__ = ["RELU", "Activation", "ConvSettings", "convolution"]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    settings: ConvSettings,
    *,
    residual: Tensor | None = None,
    cache: MutableMapping[str, Tensor],
) -> Tensor:
    """Compute `activation(F.conv2d(x, weight, bias) + residual)`.

    Args:
        x: (B, C, H, W).
        weight, bias: (D, C / groups, kernel height, kernel width) and (D,).
        residual: in the shape of the output; None: zero.
        cache: belongs to the weights, which are kept in it in another order; empty at first.
    Returns:
        (B, D, H', W').
    """
    # PyTorch 2.6's operator that adds raises an error for maps of one pixel.
    adds = residual is None or (onednn.adds_before(settings.activation) and residual.shape[2:] != (1, 1))
    if not adds or not _runs_onednn(x, weight, bias, residual):
        return plain.convolution(x, weight, bias, settings, residual)
    if "weight" not in cache:
        cache["weight"] = onednn.prepare(weight, settings, x.shape)
    return onednn.convolution(x, cache["weight"], bias, settings, residual)


def _runs_onednn(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None) -> bool:
    tensors = (x, weight, bias, residual)
    return (
        not plain_only()
        and not is_traced()
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
        and torch.backends.mkldnn.enabled
        and _is_available()
    )


_is_available = functools.cache(onednn.is_available)
