"""Convolutions of timm's networks prepared for inference: their norms, activations and learned scales are folded."""

from collections.abc import Iterable
from itertools import pairwise

from timm.layers import ConvNormAct
from timm.models import _efficientnet_blocks as blocks
from timm.models import efficientnet, hgnet, resnet
from timm.models._features import FeatureDictNet, FeatureListNet
from torch import nn

from vitkit.backbones.timm_blocks import LeanConvBNAct
from vitkit.nn.fusion import RELU, Activation, can_fold, fold, fold_scaled_relu
from vitkit.nn.layers import is_watched

_PARTS = {
    hgnet.ConvBNAct: (("conv", "bn", "act"),),
    LeanConvBNAct: (("conv", "bn", "act"),),
    ConvNormAct: (("conv", "bn", ""),),
    resnet.ResNet: (("conv1", "bn1", "act1"),),
    resnet.BasicBlock: (("conv1", "bn1", "act1"), ("conv2", "bn2", "")),
    resnet.Bottleneck: (("conv1", "bn1", "act1"), ("conv2", "bn2", "act2"), ("conv3", "bn3", "")),
    efficientnet.EfficientNet: (("conv_stem", "bn1", ""), ("conv_head", "bn2", "")),
    efficientnet.EfficientNetFeatures: (("conv_stem", "bn1", ""),),
    blocks.ConvBnAct: (("conv", "bn1", ""),),
    blocks.DepthwiseSeparableConv: (("conv_dw", "bn1", ""), ("conv_pw", "bn2", "")),
    blocks.InvertedResidual: (("conv_pw", "bn1", ""), ("conv_dw", "bn2", ""), ("conv_pwl", "bn3", "")),
    blocks.EdgeResidual: (("conv_exp", "bn1", ""), ("conv_pwl", "bn2", "")),
}
"""Class -> the convolutions that its `forward` calls right before a norm and, unless it is "", an activation."""
_IN_ORDER = (nn.Sequential, FeatureDictNet, FeatureListNet)
"""Classes that call their children in order."""


def fuse_timm(net: nn.Module) -> None:
    """Fold norms, activations and learned scales into the convolutions of one of timm's networks, in place."""
    for module in list(net.modules()):
        parts: Iterable[tuple[str, str, str]] = _PARTS.get(type(module), ())
        if type(module) in _IN_ORDER:
            names, returned = list(module._modules), set(getattr(module, "return_layers", ()))
            following = dict(pairwise([*names, ""]))
            parts = [
                (conv, norm, "" if norm in returned else following[norm])
                for conv, norm in pairwise(names)
                if conv not in returned
            ]
        for names in parts:
            _fuse(module, *names)


def _fuse(owner: nn.Module, conv: str, norm: str, act: str) -> None:
    pair = (getattr(owner, conv), getattr(owner, norm))
    if not can_fold(*pair):
        return
    # timm's norms may include the activation.
    inner = getattr(pair[1], "act", None)
    activation = None if inner is None else _activation(inner)
    rest = nn.Identity() if inner is None or activation is not None else inner
    if isinstance(rest, nn.Identity) and activation is None and act:
        activation = _activation(getattr(owner, act))
        if activation is not None:
            setattr(owner, act, nn.Identity())
    lab = getattr(owner, "lab", None)
    if activation == RELU and type(lab) is hgnet.LearnableAffineBlock and not is_watched(lab):
        owner.lab = nn.Identity()
        setattr(owner, conv, fold_scaled_relu(*pair, lab.scale, lab.bias))
    else:
        setattr(owner, conv, fold(*pair, activation))
    setattr(owner, norm, rest)


def _activation(module: nn.Module) -> Activation:
    """Return the activation of a module; None if it is not supported, or if something watches the module."""
    if is_watched(module):
        return None
    if isinstance(module, nn.ReLU6):
        return (0.0, 6.0)
    return RELU if type(module) is nn.ReLU else "silu" if type(module) is nn.SiLU else None
