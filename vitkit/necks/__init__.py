"""Between backbone and head: projections, pyramids."""

from vitkit.necks.projection import ChannelProjection
from vitkit.necks.pyramid_projection import PyramidProjection

__all__ = ["ChannelProjection", "PyramidProjection"]
