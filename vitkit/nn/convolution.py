"""Convolutions whose norm is a fixed scale and shift, which is then merged into their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from vitkit.kernels import plain_only


def conv_norm(x: Tensor, conv: nn.Conv2d, norm: nn.Module) -> Tensor:
    """Return `norm(conv(x))`, merging a norm that is a fixed scale and shift into it at almost no cost."""
    if torch.is_grad_enabled() and conv.weight.requires_grad:
        if not isinstance(norm, FrozenBatchNorm2d):
            return norm(conv(x))
        # Scaled weights would be stored for the backward pass, as many as the network has; so scale the output in
        # place.
        scale, shift = _scale_and_shift(norm)
        return conv(x).mul_(scale.view(1, -1, 1, 1)).add_(shift.view(1, -1, 1, 1))
    if not is_fixed(norm):
        return norm(conv(x))
    return F.conv2d(x, *merged(conv, norm), conv.stride, conv.padding, conv.dilation, conv.groups)


def is_fixed(norm: nn.Module) -> bool:
    """Return whether a norm is a fixed scale and shift: frozen, or a batch norm that uses its statistics."""
    uses_statistics = type(norm) is nn.BatchNorm2d and not norm.training
    return isinstance(norm, FrozenBatchNorm2d) or (uses_statistics and not plain_only())


def merged(conv: nn.Conv2d, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution, which has no bias, followed by a norm that `is_fixed`."""
    scale, shift = _scale_and_shift(norm)
    return conv.weight * scale.view(-1, 1, 1, 1), shift


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return scale, norm.bias - norm.running_mean * scale
