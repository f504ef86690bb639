"""What mask heads return per decoder layer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.structures import FeatureInfo


class MaskPredictions(dict):
    """`pred_logits`, and masks as the product of `mask_embed` and `mask_features`.

    `pred_masks` (B, Q, h, w), logits at the mask features' stride, is computed when it is first asked for: the losses
    of the earlier layers need only the masks that are matched, at a few points.
    """

    def __init__(self, pred_logits: Tensor, mask_embed: Tensor, mask_features: Tensor):
        """
        Args:
            pred_logits: (B, Q, num_classes + 1).
            mask_embed: (B, Q, channels).
            mask_features: (B, channels, h, w).
        """
        super().__init__(pred_logits=pred_logits, mask_embed=mask_embed, mask_features=mask_features)

    def __missing__(self, key: str) -> Tensor:
        if key != "pred_masks":
            raise KeyError(key)
        # What asks first may be a matcher, which needs no gradients; what asks next gets the same tensor.
        with torch.enable_grad():
            self[key] = masks_of(self["mask_embed"], self["mask_features"])
        return self[key]


def masks_of(mask_embed: Tensor, mask_features: Tensor) -> Tensor:
    """(..., Q, C) and (..., C, h, w) -> (..., Q, h, w)."""
    return (mask_embed @ mask_features.flatten(-2)).unflatten(-1, mask_features.shape[-2:])


def check_pixel_decoder(owner: str, feature_info: Mapping[str, FeatureInfo], *, num_levels: int) -> None:
    """Raises ConfigError unless there is a map for masks and `num_levels` others."""
    names = list(feature_info)
    if "mask_features" not in names or len(names) - 1 < num_levels:
        raise ConfigError(
            f"{owner}: needs 'mask_features' and {num_levels} other map(s), but the neck gives {', '.join(names)}. "
            "Choose a pixel decoder: model.neck=FPNPixelDecoder, TransformerPixelDecoder or DeformablePixelDecoder."
        )
