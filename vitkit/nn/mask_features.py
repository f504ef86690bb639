"""The feature map that query embeddings are multiplied with to give masks."""

from collections.abc import Mapping

from vitkit.errors import ConfigError
from vitkit.structures import FeatureInfo

MASK_FEATURES = "mask_features"
"""Name of the map whose product with a query's embedding is the query's mask."""


def check_pixel_decoder(owner: str, feature_info: Mapping[str, FeatureInfo], *, num_levels: int) -> None:
    """Raise ConfigError unless a neck gives mask features and at least `num_levels` other maps."""
    names = list(feature_info)
    if MASK_FEATURES not in names or len(names) - 1 < num_levels:
        raise ConfigError(
            f"{owner}: needs {MASK_FEATURES!r} and {num_levels} other map(s), but the neck returns {', '.join(names)}. "
            "Choose a pixel decoder: model.neck=FPNPixelDecoder, TransformerPixelDecoder or DeformablePixelDecoder."
        )
