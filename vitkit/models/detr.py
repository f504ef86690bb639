"""DETR: backbone, neck, head (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitkit.models.base import Detector, Part
from vitkit.ops.detections import BatchDetections, best_classes
from vitkit.registry import MODELS


@MODELS.register
class DETR(Detector):
    """A detector that predicts boxes and classes from object queries.

    Args:
        backbone, neck, head: spec or module.
        num_queries: number of boxes predicted per image.
        num_classes: number of classes without "no object"; a run sets its dataset's. The official checkpoints have
            91, for COCO's raw category ids.
        options: `training_queries` and `isolate_padding`, see `DensePredictionModel`.
    """

    class_head = ("head.class_embed.", "training_queries.denoising.label_embed.")
    class_activation = "softmax"

    def __init__(
        self, backbone: Part, neck: Part, head: Part, *, num_queries: int = 100, num_classes: int = 91, **options: Any
    ):
        super().__init__(backbone, neck, head, num_classes=num_classes, num_queries=num_queries, **options)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return every query with its best class, in the order of the queries, without suppression."""
        return best_classes(outputs["pred_logits"], outputs["pred_boxes"])
