"""DEIMv2: backbone, encoder, head (Huang et al. 2025, https://arxiv.org/abs/2509.20787)."""

from vitkit.models.dfine import DFINE
from vitkit.registry import MODELS


@MODELS.register
class DEIMv2(DFINE):
    """A real-time detector on a plain transformer with a `SpatialAdapter` or on HGNetV2, see `DEIMv2Head`; its boxes
    are made from distributions of their edges, as D-FINE's.

    The arguments are those of `QueryDetector`.
    """
