"""Ways around faults of oneDNN in the gradients of convolutions."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_narrow_maps_in_float32(model: nn.Module) -> None:
    """Let the convolutions of a model compute in float32, also under autocast, where a map is narrower than the stride.

    In bfloat16, with AVX-512, oneDNN (of torch 2.14.1) leaves a part of the weights' gradient uninitialized there: it
    is not finite, or as large as 1e37. A convolution of stride 2 meets it on maps that are one pixel wide, as those of
    small images in the last stages are.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) and module.stride[-1] > 1 and module.kernel_size[-1] > 1:
            module._conv_forward = MethodType(_conv_forward, module)  # type: ignore[method-assign]


def _conv_forward(self: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    forward: Any = type(self)._conv_forward
    if x.shape[-1] >= self.stride[-1]:
        return forward(self, x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return forward(self, x.to(weight.dtype), weight, bias)


def subsample_before_1x1(model: nn.Module) -> None:
    """Let the 1x1 convolutions of a model with fewer than 16 input channels, without padding, subsample before.

    For maps in channels-last order, oneDNN (of torch 2.14.1) writes beyond its memory as it computes the gradient of
    the weights of a strided one, with AVX-512 below 16 channels, with AVX2 below 8: sooner or later the process dies.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels < 16 and module.kernel_size == (1, 1):
            module._conv_forward = MethodType(_subsampled_conv_forward, module)  # type: ignore[method-assign]


def _subsampled_conv_forward(self: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x[..., :: self.stride[0], :: self.stride[1]], weight, bias, groups=self.groups)
