"""A convolution with its activation, by PyTorch's operators one after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.kernels.convolution.settings import RELU, Settings


def convolution(x: Tensor, weight: Tensor, bias: Tensor, settings: Settings, residual: Tensor | None) -> Tensor:
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
