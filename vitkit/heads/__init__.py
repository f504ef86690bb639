"""From features to predictions."""

from vitkit.heads.deformable_detr import DeformableDETRHead
from vitkit.heads.detr import DETRHead

__all__ = ["DETRHead", "DeformableDETRHead"]
