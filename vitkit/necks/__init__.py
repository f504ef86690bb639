"""Between backbone and head: projections, pyramids."""

from vitkit.necks.projection import ChannelProjection

__all__ = ["ChannelProjection"]
