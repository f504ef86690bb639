"""Necks, between backbone and head: projections and pyramids."""

from vitkit.necks.c2f_projection import C2fProjection
from vitkit.necks.deimv2_encoder import DEIMv2Encoder
from vitkit.necks.dfine_encoder import DFINEEncoder
from vitkit.necks.hybrid_encoder import HybridEncoder
from vitkit.necks.lite_encoder import LiteEncoder
from vitkit.necks.pixel_decoders import DeformablePixelDecoder, FPNPixelDecoder, TransformerPixelDecoder
from vitkit.necks.projection import ChannelProjection
from vitkit.necks.pyramid_projection import PyramidProjection
from vitkit.necks.simple_pyramid import SimpleFeaturePyramid

__all__ = [
    "C2fProjection",
    "ChannelProjection",
    "DEIMv2Encoder",
    "DFINEEncoder",
    "DeformablePixelDecoder",
    "FPNPixelDecoder",
    "HybridEncoder",
    "LiteEncoder",
    "PyramidProjection",
    "SimpleFeaturePyramid",
    "TransformerPixelDecoder",
]
