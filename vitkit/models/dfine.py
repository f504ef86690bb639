"""D-FINE: backbone, hybrid encoder, head (Peng et al. 2024, https://arxiv.org/abs/2410.13842)."""

from collections.abc import Mapping

from torch import Tensor

from vitkit.models.rt_detr import RTDETR
from vitkit.ops.boxes import clamp_sizes
from vitkit.registry import MODELS
from vitkit.structures import Detections


@MODELS.register
class DFINE(RTDETR):
    """RT-DETR with a head that refines distributions of the edges of its boxes, `DFINEHead`.

    Its arguments, outputs and results are RT-DETR's.
    """

    def detections(self, outputs: Mapping[str, Tensor]) -> Detections:
        """See `DeformableDETR`; a box whose opposite edges have crossed has no width or height."""
        return super().detections({**outputs, "pred_boxes": clamp_sizes(outputs["pred_boxes"])})
