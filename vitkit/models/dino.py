"""DINO: backbone, neck, head (Zhang et al. 2022, https://arxiv.org/abs/2203.03605)."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import QueryDetector
from vitkit.models.variants import deformable_variant
from vitkit.ops.detections import BatchDetections, best_pairs, suppress_duplicates
from vitkit.registry import MODELS, Spec


@MODELS.register
class DINO(QueryDetector):
    """A detector whose queries start from boxes that the encoder selects; trained with contrastive denoising.

    The arguments are those of `QueryDetector`. The official checkpoints have 91 classes, for COCO's raw
    category ids.
    """

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 900,
        num_classes: int = 91,
        **options: Any,
    ):
        super().__init__(backbone, neck, head, num_queries=num_queries, num_classes=num_classes, **options)

    @staticmethod
    def variant_of(names: Iterable[str]) -> str:
        """Return the variant that the names of a state dict belong to, such as "of 4 levels in two stages"."""
        return deformable_variant(names)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the best pairs of a query and a class, best first; a query may be returned with several classes."""
        best = best_pairs(outputs["pred_logits"], outputs["pred_boxes"], self.num_detections)
        return suppress_duplicates(best, self.nms_iou)
