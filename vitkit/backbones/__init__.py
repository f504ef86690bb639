"""Image backbones: `backbone(images) -> dict of feature maps`, fine to coarse."""

from vitkit.backbones.hgnetv2 import SmallHGNetV2
from vitkit.backbones.lrnet import LRNET_VARIANTS, LRNet
from vitkit.backbones.mvit import MVIT_VARIANTS, MViT
from vitkit.backbones.nonlocal_resnet import CLIP_RESNET_VARIANTS, NON_LOCAL_RESNET_VARIANTS, ClipResNet, NonLocalResNet
from vitkit.backbones.resnet import RESNET_VARIANTS, ResNet
from vitkit.backbones.resnet_vd import ResNetVD
from vitkit.backbones.spatial_adapter import SpatialAdapter
from vitkit.backbones.swin import SWIN_VARIANTS, Swin
from vitkit.backbones.swinv2 import SWINV2_VARIANTS, SwinV2
from vitkit.backbones.timesformer import TIMESFORMER_VARIANTS, TimeSformer
from vitkit.backbones.timm_adapter import TimmBackbone
from vitkit.backbones.vit import VIT_VARIANTS, ViT
from vitkit.backbones.vitdet import VITDET_VARIANTS, ViTDet
from vitkit.backbones.windowed_vit import WindowedViT

__all__ = [
    "CLIP_RESNET_VARIANTS",
    "LRNET_VARIANTS",
    "MVIT_VARIANTS",
    "NON_LOCAL_RESNET_VARIANTS",
    "RESNET_VARIANTS",
    "SWINV2_VARIANTS",
    "SWIN_VARIANTS",
    "TIMESFORMER_VARIANTS",
    "VITDET_VARIANTS",
    "VIT_VARIANTS",
    "ClipResNet",
    "LRNet",
    "MViT",
    "NonLocalResNet",
    "ResNet",
    "ResNetVD",
    "SmallHGNetV2",
    "SpatialAdapter",
    "Swin",
    "SwinV2",
    "TimeSformer",
    "TimmBackbone",
    "ViT",
    "ViTDet",
    "WindowedViT",
]
