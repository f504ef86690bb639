"""Blocks of timm's networks that store less for the backward pass."""

from timm.models import hgnet
from torch import Tensor, nn

from vitkit.kernels.norm_activation import norm_relu_scale


class LeanConvBNAct(hgnet.ConvBNAct):
    """HGNetV2's convolution, norm, ReLU, and learned scale and shift, with the same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        watched = any(module._forward_hooks or module._forward_pre_hooks for module in (self.act, self.lab))
        is_plain = type(self.act) is nn.ReLU and type(self.lab) is hgnet.LearnableAffineBlock and not watched
        # In inference a norm may be merged into the convolution.
        if not (is_plain and self.bn.training):
            return super().forward(x)
        return norm_relu_scale(self.conv(x), self.bn, self.lab.scale, self.lab.bias)


def make_lean(net: nn.Module) -> nn.Module:
    """Let the blocks of one of timm's networks store less, in place; return the network."""
    for module in net.modules():
        if type(module) is hgnet.ConvBNAct:
            module.__class__ = LeanConvBNAct
    return net
