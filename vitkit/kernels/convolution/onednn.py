"""A convolution with its activation by oneDNN, through private PyTorch operators that have no gradient."""

import math

import torch
from torch import Tensor

from vitkit.kernels.convolution.plain import RELU, Activation, ConvSettings


def is_available() -> bool:
    """Return whether PyTorch has the operators, on a processor on which they are known to be fast."""
    names = ("_convolution_pointwise", "_reorder_convolution_weight")
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and all(hasattr(torch.ops.mkldnn, name) for name in names)
    )


def prepare(weight: Tensor, settings: ConvSettings, shape: torch.Size) -> Tensor:
    """Return the weights in the order in which oneDNN reads them for images of a shape; other shapes are slower."""
    stride, padding, dilation, groups, _ = settings
    return torch.ops.mkldnn._reorder_convolution_weight(weight, padding, stride, dilation, groups, shape)


def convolution(x: Tensor, prepared: Tensor, bias: Tensor, settings: ConvSettings, residual: Tensor | None) -> Tensor:
    """See the function of that name in `vitkit.kernels.convolution`; `prepared` are the weights from `prepare`."""
    stride, padding, dilation, groups, activation = settings
    name, numbers = _unary(activation)
    # Only in this order oneDNN is at least as fast as PyTorch's own convolutions, up to ten times for depthwise ones.
    x, geometry = x.contiguous(memory_format=torch.channels_last), (padding, stride, dilation, groups)
    if residual is None:
        return torch.ops.mkldnn._convolution_pointwise(x, prepared, bias, *geometry, name, numbers, "")
    residual = residual.contiguous(memory_format=torch.channels_last)
    unary = None if name == "none" else name
    return torch.ops.mkldnn._convolution_pointwise.binary(
        x, residual, prepared, bias, *geometry, "add", None, unary, numbers, ""
    )


def adds_before(activation: Activation) -> bool:
    """Return whether oneDNN can add a residual before this activation."""
    return activation is None or activation == RELU


def _unary(activation: Activation) -> tuple[str, list[float]]:
    """Return oneDNN's name of an activation, and its numbers."""
    if activation is None or activation == RELU:
        return ("none" if activation is None else "relu"), []
    if activation == "silu":
        return "swish", []
    low, high = activation
    return "hardtanh", [-math.inf if low is None else low, math.inf if high is None else high]
