"""DETR: backbone, neck, head (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import Detector
from vitkit.ops.detections import BatchDetections, best_classes, in_pixels
from vitkit.registry import MODELS, Spec
from vitkit.structures import Detections, DetectionTarget


@MODELS.register
class DETR(Detector):
    """A detector that predicts boxes and classes from object queries.

    Args:
        backbone, neck, head: spec or module.
        num_queries: number of boxes predicted per image.
        num_classes: number of classes without "no object"; a run sets its dataset's. The official checkpoints have
            91, for COCO's raw category ids.
        training_queries, isolate_padding: see `DensePredictionModel`.
    """

    class_head = ("head.class_embed.", "training_queries.denoising.label_embed.")
    class_activation = "softmax"

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 100,
        num_classes: int = 91,
        training_queries: Sequence[Spec] = (),
        isolate_padding: bool = False,
    ):
        super().__init__(
            backbone,
            neck,
            head,
            num_classes=num_classes,
            num_queries=num_queries,
            training_queries=training_queries,
            isolate_padding=isolate_padding,
        )

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            the head's outputs:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the unpadded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            training_outputs: only with training queries, a list of their outputs, see `QuerySet`.
        """
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        return self.run_head(features, padding_mask, targets)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return every query with its best class, in the order of the queries, without suppression."""
        return best_classes(outputs["pred_logits"], outputs["pred_boxes"])

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the detections of each image, in pixels of the original image."""
        return in_pixels(self.detections(outputs), image_sizes)
