"""Convolutions prepared for inference, with the norm merged into their weights and the activation into their kernel.

`Model.fuse` asks every module that has a method `fused` for what takes its place; the functions here make that.
"""

from timm.layers.norm_act import BatchNormAct2d, FrozenBatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from vitkit.kernels.convolution import RELU, Activation, ConvSettings, convolution
from vitkit.nn.layers import InferenceOnly, is_watched, merge_norm_unrounded
from vitkit.nn.padding import zero_padding

__all__ = ["RELU", "Activation", "FusedConv", "can_fold", "fold", "fold_scaled_relu", "fuse_pair"]

_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d, BatchNormAct2d, SyncBatchNormAct, FrozenBatchNormAct2d)


class FusedConv(InferenceOnly, nn.Conv2d):
    """A convolution with the norm and the activation that followed it, for inference only.

    Args:
        conv: the convolution, for its settings.
        weight, bias: those with the norm, rounded here to the dtype of the convolution.
        activation: see `vitkit.kernels.convolution.Activation`.
    """

    def __init__(self, conv: nn.Conv2d, weight: Tensor, bias: Tensor, activation: Activation = None):
        channels = (conv.in_channels, conv.out_channels)
        geometry = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
        super().__init__(*channels, *geometry, device="meta")
        self.weight = nn.Parameter(weight.detach().type_as(conv.weight), requires_grad=False)
        self.bias = nn.Parameter(bias.detach().type_as(conv.weight), requires_grad=False)
        self.settings = ConvSettings(conv.stride, conv.padding, conv.dilation, conv.groups, activation)
        self._cache = {}
        self.eval()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, *, residual: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H', W'): the activation of the norm and of the residual, if any.

        With a padding mask, (B, H, W) bool of any size with True = padding, padding counts as zero.
        """
        if self.kernel_size != (1, 1):
            x = zero_padding(x, padding_mask)
        return convolution(x, self.weight, self.bias, self.settings, residual=residual, cache=self._cache)


def can_fold(conv: nn.Module, norm: nn.Module) -> bool:
    """Return whether a norm after a convolution can be part of its weights, and nothing watches the two."""
    return (
        # Subclasses may compute something else.
        type(conv) is nn.Conv2d
        and type(norm) in _NORMS
        and not (is_watched(conv) or is_watched(norm))
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and norm.running_var is not None
        and not norm.training
    )


def fold(conv: nn.Conv2d, norm: nn.Module, activation: Activation = None) -> FusedConv:
    """Return the convolution with its norm, see `can_fold`, and an activation."""
    return FusedConv(conv, *merge_norm_unrounded(conv, norm), activation)


def fold_scaled_relu(conv: nn.Conv2d, norm: nn.Module, scale: Tensor, shift: Tensor) -> FusedConv:
    """Return the convolution with its norm, see `can_fold`, ReLU, and a scale and a shift, one number each, after it.

    For a scale s >= 0, s * relu(x) + b = max(s * x + b, b); for a negative one it is min(s * x + b, b). The shift can
    thus be folded whatever the next convolution pads with.
    """
    weight, bias = merge_norm_unrounded(conv, norm)
    factor, limit = scale.item(), shift.item()
    limits = (limit, None) if factor >= 0 else (None, limit)
    return FusedConv(conv, weight * factor, bias * factor + limit, limits)


def fuse_pair(owner: nn.Module, conv: str, norm: str, activation: Activation = None) -> None:
    """Fold a norm into the convolution before it, if that is possible.

    Args:
        owner: the module that they are parts of, and whose `forward` calls one right after the other.
        conv, norm: their dotted names; the norm becomes an identity.
        activation: the one after the norm, which `owner` no longer computes if the norm is an identity.
    """
    pair = (owner.get_submodule(conv), owner.get_submodule(norm))
    if can_fold(*pair):
        owner.set_submodule(conv, fold(*pair, activation))
        owner.set_submodule(norm, nn.Identity())
