"""RT-DETRv2: backbone, hybrid encoder, head (Lv et al. 2024, https://arxiv.org/abs/2407.17140)."""

from vitkit.models.base import QueryDetector
from vitkit.registry import MODELS


@MODELS.register
class RTDETRv2(QueryDetector):
    """A real-time detector whose queries start from the encoder's best locations, see `RTDETRv2Head`.

    The arguments are those of `QueryDetector`.
    """
