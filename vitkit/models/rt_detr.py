"""RT-DETR: backbone, hybrid encoder, head (Zhao et al. 2023, https://arxiv.org/abs/2304.08069)."""

from vitkit.models.base import QueryDetector
from vitkit.registry import MODELS


@MODELS.register
class RTDETR(QueryDetector):
    """A real-time detector whose queries start from the encoder's best locations; trained with contrastive denoising.

    The arguments are those of `QueryDetector`.
    """
