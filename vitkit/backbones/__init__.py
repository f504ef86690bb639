"""Image backbones: `backbone(images) -> dict of feature maps`, fine to coarse."""

from vitkit.backbones.resnet import RESNET_VARIANTS, ResNet
from vitkit.backbones.swin import SWIN_VARIANTS, Swin

__all__ = ["RESNET_VARIANTS", "SWIN_VARIANTS", "ResNet", "Swin"]
