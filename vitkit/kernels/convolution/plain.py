"""A convolution with its activation, by PyTorch's operators one after the other."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu"] | tuple[float | None, float | None] | None
"""A pair limits the values to at least the first number and at most the second; None is no limit."""
RELU = (0.0, None)


class ConvSettings(NamedTuple):
    """Stride, padding, dilation, groups and activation of a convolution, as `F.conv2d` takes them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    activation: Activation = None


def convolution(x: Tensor, weight: Tensor, bias: Tensor, settings: ConvSettings, residual: Tensor | None) -> Tensor:
    """See the function of that name in `vitkit.kernels.convolution`."""
    stride, padding, dilation, groups, activation = settings
    x = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if residual is not None:
        x = x + residual
    if activation is None:
        return x
    in_place = not torch.is_grad_enabled()
    if activation == "silu":
        return F.silu(x, inplace=in_place)
    if activation == RELU:
        return F.relu(x, inplace=in_place)
    return x.clamp_(*activation) if in_place else x.clamp(*activation)
