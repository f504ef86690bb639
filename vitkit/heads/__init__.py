"""Heads, which predict from features: a file per paper."""

from vitkit.heads.dab_deformable_detr import DABDeformableDETRHead
from vitkit.heads.deformable_detr import DeformableDETRHead
from vitkit.heads.deimv2 import DEIMv2Head
from vitkit.heads.detr import DETRHead
from vitkit.heads.dfine import DFINEHead
from vitkit.heads.dino import DINOHead
from vitkit.heads.mask2former import Mask2FormerHead
from vitkit.heads.maskformer import MaskFormerHead
from vitkit.heads.per_pixel import PerPixelBaselineHead, PerPixelBaselinePlusHead
from vitkit.heads.rf_detr import RFDETRHead
from vitkit.heads.rt_detr import RTDETRHead
from vitkit.heads.rt_detr_v2 import RTDETRv2Head

__all__ = [
    "DABDeformableDETRHead",
    "DEIMv2Head",
    "DETRHead",
    "DFINEHead",
    "DINOHead",
    "DeformableDETRHead",
    "Mask2FormerHead",
    "MaskFormerHead",
    "PerPixelBaselineHead",
    "PerPixelBaselinePlusHead",
    "RFDETRHead",
    "RTDETRHead",
    "RTDETRv2Head",
]
