"""RT-DETRv2: backbone, hybrid encoder, head (Lv et al. 2024, https://arxiv.org/abs/2407.17140)."""

from collections.abc import Mapping

from torch import Tensor

from vitkit.models.base import QueryDetector
from vitkit.ops.detections import BatchDetections, best_pairs, suppress_duplicates
from vitkit.registry import MODELS


@MODELS.register
class RTDETRv2(QueryDetector):
    """A real-time detector whose queries start from the encoder's best locations, see `RTDETRv2Head`.

    The arguments are those of `QueryDetector`.
    """

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        """Return the best pairs of a query and a class, best first; a query may be returned with several classes."""
        best = best_pairs(outputs["pred_logits"], outputs["pred_boxes"], self.num_detections)
        return suppress_duplicates(best, self.nms_iou)
