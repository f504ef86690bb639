"""Deformable DETR: backbone, neck, head (Zhu et al. 2021, https://arxiv.org/abs/2010.04159)."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import QueryDetector
from vitkit.models.variants import deformable_variant
from vitkit.ops.detections import BatchDetections, best_pairs, suppress_duplicates
from vitkit.registry import MODELS, Spec


@MODELS.register
class DeformableDETR(QueryDetector):
    """A detector whose queries look at a few points of several maps, with one sigmoid per class.

    The arguments are those of `QueryDetector`. The official checkpoints have 91 classes, for COCO's raw
    category ids.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 300,
        num_classes: int = 91,
        num_detections: int = 100,
        **options: Any,
    ):
        sizes = dict(num_queries=num_queries, num_classes=num_classes, num_detections=num_detections)
        super().__init__(backbone, neck, head, **sizes, **options)

    @staticmethod
    def variant_of(names: Iterable[str]) -> str:
        """Return the variant that the names of a state dict belong to, such as "of 4 levels in two stages"."""
        return deformable_variant(names)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the best pairs of a query and a class, best first; a query may be returned with several classes."""
        best = best_pairs(outputs["pred_logits"], outputs["pred_boxes"], self.num_detections)
        return suppress_duplicates(best, self.nms_iou)
