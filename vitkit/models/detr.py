"""DETR: backbone, neck, head (Carion et al. 2020, https://arxiv.org/abs/2005.12872)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import DensePredictionModel
from vitkit.nn.query_groups import QuerySettings
from vitkit.ops.boxes import cxcywh_to_xyxy, scale_boxes
from vitkit.registry import MODELS, Spec
from vitkit.structures import Detections, DetectionTarget


@MODELS.register
class DETR(DensePredictionModel):
    """A detector that predicts boxes and classes from object queries.

    Args:
        backbone: spec or module, as are `neck` and `head`.
        queries: `num_queries` boxes are predicted per image; additional groups of queries help in training.
        num_classes: number of classes without "no object"; a run sets its dataset's. The official checkpoints have
            91, for COCO's raw category ids.
        isolate_padding: see `DensePredictionModel`.
    """

    class_head = ("head.class_embed.", "head.denoising.label_embed.")
    class_activation = "softmax"

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        queries: QuerySettings = QuerySettings(),
        num_classes: int = 91,
        isolate_padding: bool = False,
    ):
        super().__init__(
            backbone, neck, head, queries=queries, num_classes=num_classes, isolate_padding=isolate_padding
        )

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the un-padded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            Further outputs depend on the head, see there.
        """
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.features(images, padding_mask)
        return self.head_outputs(features, padding_mask, targets)

    def detections(self, outputs: Mapping[str, Tensor]) -> Detections:
        """Return every query's best class and box, without thresholding or suppression.

        Returns:
            the detections of all images together, (B, Q, ...) in the order of queries; boxes in 0..1 of the un-padded
            image.
        """
        scores, labels = outputs["pred_logits"].float().softmax(dim=-1)[..., :-1].max(dim=-1)
        boxes_xyxy = cxcywh_to_xyxy(outputs["pred_boxes"].float())
        return Detections(scores=scores, labels=labels, boxes_xyxy=boxes_xyxy)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the `detections` of each image, in pixels of the original image."""
        scores, labels, boxes_xyxy = self.detections(outputs).values()
        boxes_xyxy = scale_boxes(boxes_xyxy, image_sizes)
        return [Detections(scores=s, labels=l, boxes_xyxy=b) for s, l, b in zip(scores, labels, boxes_xyxy)]
