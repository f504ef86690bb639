"""Heads, which predict from features."""

from vitkit.heads.deformable_detr import DeformableDETRHead
from vitkit.heads.detr import DETRHead
from vitkit.heads.mask2former import Mask2FormerHead
from vitkit.heads.maskformer import MaskFormerHead
from vitkit.heads.per_pixel import PerPixelBaselineHead, PerPixelBaselinePlusHead

__all__ = [
    "DETRHead",
    "DeformableDETRHead",
    "Mask2FormerHead",
    "MaskFormerHead",
    "PerPixelBaselineHead",
    "PerPixelBaselinePlusHead",
]
