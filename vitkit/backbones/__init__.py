"""Image backbones: `backbone(images) -> dict of feature maps`, fine to coarse."""

from vitkit.backbones.resnet import RESNET_VARIANTS, ResNet

__all__ = ["RESNET_VARIANTS", "ResNet"]
