"""Necks, between backbone and head: projections and pyramids."""

from vitkit.necks.c2f_projection import C2fProjection
from vitkit.necks.dfine_encoder import DFINEEncoder
from vitkit.necks.hybrid_encoder import HybridEncoder
from vitkit.necks.pixel_decoders import DeformablePixelDecoder, FPNPixelDecoder, TransformerPixelDecoder
from vitkit.necks.projection import ChannelProjection
from vitkit.necks.pyramid_projection import PyramidProjection
from vitkit.necks.simple_pyramid import SimpleFeaturePyramid

__all__ = [
    "C2fProjection",
    "ChannelProjection",
    "DFINEEncoder",
    "DeformablePixelDecoder",
    "FPNPixelDecoder",
    "HybridEncoder",
    "PyramidProjection",
    "SimpleFeaturePyramid",
    "TransformerPixelDecoder",
]
