"""ECDet, EdgeCrafter's detector: ECViT, hybrid encoder, head (https://arxiv.org/abs/2603.18739)."""

from vitkit.models.deimv2 import DEIMv2
from vitkit.registry import MODELS


@MODELS.register
class ECDet(DEIMv2):
    """A real-time detector of small transformers: `ECViT`; `DEIMv2Encoder` with block="deim" and activation="silu";
    `DEIMv2Head` with layer="dfine", whose decoder has D-FINE's layers.

    The arguments are those of `QueryDetector`.
    """
