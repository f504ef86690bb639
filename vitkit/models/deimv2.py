"""DEIMv2: backbone, encoder, head (Huang et al. 2025, https://arxiv.org/abs/2509.20787)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.models.base import Detector, check_detections
from vitkit.ops.boxes import clamp_sizes
from vitkit.ops.detections import BatchDetections, best_pairs, in_pixels, suppress_duplicates
from vitkit.registry import MODELS, Spec
from vitkit.structures import Detections, DetectionTarget


@MODELS.register
class DEIMv2(Detector):
    """A real-time detector on a plain transformer with a `SpatialAdapter` or on HGNetV2, see `DEIMv2Head`.

    Args:
        backbone, neck, head: spec or module.
        num_queries: number of boxes predicted per image.
        num_classes: number of classes; a run sets its dataset's.
        num_detections: number of detections per image.
        nms_iou: detections that overlap a better one of their class by more than this IoU get the score 0; None leaves
            them, as in the paper.
        training_queries, isolate_padding: see `DensePredictionModel`.
    Raises:
        ConfigError: a number is out of range; see `DensePredictionModel`.
    """

    class_head = ("head.class_embed.", "head.proposals.class_embed.", "training_queries.denoising.label_embed.")
    class_activation = "sigmoid"

    def __init__(
        self,
        backbone: Spec | nn.Module,
        neck: Spec | nn.Module,
        head: Spec | nn.Module,
        *,
        num_queries: int = 300,
        num_classes: int = 80,
        num_detections: int = 300,
        nms_iou: float | None = None,
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
        check_detections(num_detections, nms_iou)
        self.num_detections, self.nms_iou = num_detections, nms_iou

    def forward(
        self, images: Tensor, padding_mask: Tensor | None = None, targets: Sequence[DetectionTarget] | None = None
    ) -> dict[str, Any]:
        """Predict a box and class logits per query.

        Args:
            targets: only in training, see `uses_targets`.
        Returns:
            the head's outputs:
            pred_logits: (B, Q, num_classes), a sigmoid per class.
            pred_boxes: (B, Q, 4) cxcywh in 0..1 of the unpadded image.
            aux_outputs: the same two for each decoder layer but the last, first layer first.
            training_outputs: of the first stage, and of training queries if there are any: a list, see
                `QuerySet`.
        """
        images, padding_mask = self.prepare(images, padding_mask)
        features = self.neck(self.backbone_maps(images, padding_mask), padding_mask)
        return self.run_head(features, padding_mask, targets)

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the best pairs of a query and a class, best first; a query may be returned with several classes."""
        # A box whose opposite edges have crossed has no width or height.
        boxes_cxcywh = clamp_sizes(outputs["pred_boxes"])
        best = best_pairs(outputs["pred_logits"], boxes_cxcywh, self.num_detections)
        return suppress_duplicates(best, self.nms_iou)

    def postprocess(self, outputs: dict[str, Any], image_sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Return the detections of each image, in pixels of the original image."""
        return in_pixels(self.detections(outputs), image_sizes)
