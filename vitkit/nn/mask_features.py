"""The feature map that query embeddings are multiplied with to give masks."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation

from vitkit.errors import ConfigError
from vitkit.nn.padding import group_norm, zero_padding
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


class ConvGroupNorm(Conv2dNormActivation):
    """Convolution without bias, group norm with 32 groups, and optionally ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, relu: bool):
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            norm_layer=partial(nn.GroupNorm, 32),
            activation_layer=nn.ReLU if relu else None,
        )
        nn.init.kaiming_uniform_(self[0].weight, a=1)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, in_channels, H, W) -> (B, out_channels, H, W)."""
        convolution, norm, *activation = self
        x = convolution(zero_padding(x, padding_mask))
        x = group_norm(x, padding_mask, norm)
        return activation[0](x) if activation else x
