"""D-FINE: backbone, hybrid encoder, head (Peng et al. 2024, https://arxiv.org/abs/2410.13842)."""

from vitkit.models.rt_detr import RTDETR
from vitkit.registry import MODELS


@MODELS.register
class DFINE(RTDETR):
    """RT-DETR with a head that refines distributions of the edges of its boxes, `DFINEHead`.

    Its arguments, outputs and results are RT-DETR's.
    """
