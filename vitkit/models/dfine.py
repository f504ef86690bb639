"""D-FINE: backbone, hybrid encoder, head (Peng et al. 2024, https://arxiv.org/abs/2410.13842)."""

from collections.abc import Mapping

from torch import Tensor

from vitkit.models.base import QueryDetector
from vitkit.ops.boxes import clamp_sizes
from vitkit.ops.detections import BatchDetections
from vitkit.registry import MODELS


@MODELS.register
class DFINE(QueryDetector):
    """A real-time detector that refines distributions of the edges of its boxes, `DFINEHead`.

    The arguments are those of `QueryDetector`.
    """

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        # A box whose opposite edges have crossed has no width or height.
        return super().detections({**outputs, "pred_boxes": clamp_sizes(outputs["pred_boxes"])})
