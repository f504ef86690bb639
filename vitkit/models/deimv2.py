"""DEIMv2: backbone, encoder, head (Huang et al. 2025, https://arxiv.org/abs/2509.20787)."""

from collections.abc import Mapping

from torch import Tensor

from vitkit.models.base import QueryDetector
from vitkit.ops.boxes import clamp_sizes
from vitkit.ops.detections import BatchDetections
from vitkit.registry import MODELS


@MODELS.register
class DEIMv2(QueryDetector):
    """A real-time detector on a plain transformer with a `SpatialAdapter` or on HGNetV2, see `DEIMv2Head`.

    The arguments are those of `QueryDetector`.
    """

    def detections(self, outputs: Mapping[str, Tensor]) -> BatchDetections:
        # A box whose opposite edges have crossed has no width or height.
        return super().detections({**outputs, "pred_boxes": clamp_sizes(outputs["pred_boxes"])})
