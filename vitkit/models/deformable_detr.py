"""Deformable DETR: backbone, neck, head (Zhu et al. 2021, https://arxiv.org/abs/2010.04159)."""

from typing import Any

from vitkit.models.base import Part, QueryDetector
from vitkit.models.variants import deformable_variant
from vitkit.registry import MODELS


@MODELS.register
class DeformableDETR(QueryDetector):
    """A detector whose queries look at a few points of several maps, with one sigmoid per class.

    The arguments are those of `QueryDetector`. The official checkpoints have 91 classes, for COCO's raw
    category ids.
    """

    def __init__(
        self, backbone: Part, neck: Part, head: Part, *, num_classes: int = 91, num_detections: int = 100, **rest: Any
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, num_detections=num_detections, **rest)

    variant_of = staticmethod(deformable_variant)
