"""A way around wrong gradients of oneDNN's convolutions in bfloat16."""

from types import MethodType
from typing import Any

import torch
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
