"""MaskFormer's head: DETR's transformer, whose queries become classes and masks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.detr import TransformerHead
from vitkit.nn.layers import MLP
from vitkit.nn.transformer import EncoderDecoderSettings
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class MaskFormerHead(TransformerHead):
    """Cheng et al. 2021, https://arxiv.org/abs/2107.06278. Reads the map for masks and the coarsest map.

    Args:
        feature_info: of a pixel decoder's maps: "mask_features" first, then what the queries attend to.
        num_classes: without the no-object class.
        num_queries: masks predicted per image.
    Raises:
        ConfigError: there is no map for masks, or no other.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: EncoderDecoderSettings = EncoderDecoderSettings(num_encoder_layers=0),
    ):
        super().__init__()
        d_model = settings.d_model
        check_pixel_decoder("MaskFormerHead", feature_info, num_levels=1)
        self.feature_name = list(feature_info)[-1]
        channels = feature_info[self.feature_name].channels
        self.input_proj = nn.Identity() if channels == d_model else nn.Conv2d(channels, d_model, kernel_size=1)
        if channels != d_model:
            nn.init.kaiming_uniform_(self.input_proj.weight, a=1)
            nn.init.zeros_(self.input_proj.bias)
        self.make_transformer(num_queries, settings)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = MLP((d_model, d_model, d_model, feature_info["mask_features"].channels))

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        Returns:
            pred_logits: (B, Q, num_classes + 1), the last for no object.
            pred_masks: (B, Q, h, w) logits at the stride of the map for masks.
            mask_embed: (B, Q, channels), and mask_features: (B, channels, h, w), whose product they are.
            aux_outputs: the same of each decoder layer but the last, first layer first; without pred_masks, as the
                losses need only the masks that are matched, at a few points.
        """
        states = self.decode(features, padding_mask)
        mask_features = features["mask_features"]
        outputs = [
            dict(pred_logits=logits, mask_embed=embed, mask_features=mask_features)
            for logits, embed in zip(self.class_embed(states), self.mask_embed(states))
        ]
        last = outputs.pop()
        return dict(last, pred_masks=mask_logits(last["mask_embed"], mask_features), aux_outputs=outputs)

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Tensor:
        """Return the queries after each decoder layer, (layers, B, Q, d_model); arguments as of `forward`."""
        return self.transform(self.input_proj(features[self.feature_name]), padding_mask).states


def check_pixel_decoder(owner: str, feature_info: Mapping[str, FeatureInfo], *, num_levels: int) -> None:
    """Raise ConfigError unless there is a map for masks and `num_levels` others."""
    names = list(feature_info)
    if "mask_features" not in names or len(names) - 1 < num_levels:
        raise ConfigError(
            f"{owner}: needs 'mask_features' and {num_levels} other map(s), but the neck gives {', '.join(names)}. "
            "Choose a pixel decoder: model.neck=FPNPixelDecoder, TransformerPixelDecoder or DeformablePixelDecoder."
        )
