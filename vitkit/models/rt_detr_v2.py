"""RT-DETRv2: backbone, hybrid encoder, head (Lv et al. 2024, https://arxiv.org/abs/2407.17140)."""

from vitkit.models.rt_detr import RTDETR
from vitkit.registry import MODELS


@MODELS.register
class RTDETRv2(RTDETR):
    """RT-DETR with the head of its second version, `RTDETRv2Head`, and the names of its weights.

    Its arguments, outputs and results are RT-DETR's.
    """
