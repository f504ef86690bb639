"""From features to predictions."""

from vitkit.heads.detr import DETRHead

__all__ = ["DETRHead"]
