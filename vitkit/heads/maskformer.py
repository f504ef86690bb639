"""MaskFormer's head: DETR's transformer, whose queries predict classes and masks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.heads.detr import Decoded, TransformerHead
from vitkit.nn.layers import MLP
from vitkit.nn.query_groups import GroupSettings
from vitkit.nn.transformer import EncoderDecoderSettings
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class MaskFormerHead(TransformerHead):
    """MaskFormer's head (Cheng et al. 2021, https://arxiv.org/abs/2107.06278), for mask features and the coarsest map.

    Args:
        feature_info: description of a pixel decoder's maps: "mask_features" first, then those that the queries attend
            to.
        num_classes: number of classes, without "no object".
        num_queries: number of masks predicted per image.
        query_groups: further queries in training (Group DETR, H-DETR).
    Raises:
        ConfigError: there is no mask-feature map, or no other map.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        num_queries: int,
        settings: EncoderDecoderSettings = EncoderDecoderSettings(num_encoder_layers=0),
        query_groups: GroupSettings = GroupSettings(),
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
        self.make_transformer(num_queries, settings, query_groups)
        self.class_embed = nn.Linear(d_model, num_classes + 1)
        self.mask_embed = MLP((d_model, d_model, d_model, feature_info["mask_features"].channels))

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_masks: (B, Q, h, w) logits at the stride of the mask features.
            mask_embed, mask_features: (B, Q, channels) and (B, channels, h, w), whose product is pred_masks.
            aux_outputs: the same for each decoder layer but the last, first layer first; without pred_masks, as the
                losses only need the matched masks, at a few points.
            groups, one_to_many: in training, the same for further groups of queries, see `QueryLayout`.
        """
        decoded = self.decode(features, padding_mask)
        layers = [
            dict(pred_logits=logits, mask_embed=embed)
            for logits, embed in zip(self.class_embed(decoded.states), self.mask_embed(decoded.states))
        ]
        return with_masks(decoded.layout.outputs(layers), features["mask_features"])

    def decode(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> Decoded:
        """Return the decoded queries, before classes and masks are predicted; arguments as in `forward`."""
        return self.transform(self.input_proj(features[self.feature_name]), padding_mask)


def with_masks(outputs: dict[str, Any], mask_features: Tensor) -> dict[str, Any]:
    """Add the mask features to the outputs of all groups in a `QueryLayout`, and pred_masks to the usual queries'."""
    parts = [outputs, *outputs.get("groups", ())]
    parts += [outputs[name] for name in ("denoising", "one_to_many") if name in outputs]
    for part in parts:
        for layer in (part, *part["aux_outputs"]):
            layer["mask_features"] = mask_features
    return {**outputs, "pred_masks": mask_logits(outputs["mask_embed"], mask_features)}


def check_pixel_decoder(owner: str, feature_info: Mapping[str, FeatureInfo], *, num_levels: int) -> None:
    """Raise ConfigError unless there is a mask-feature map and at least `num_levels` others."""
    names = list(feature_info)
    if "mask_features" not in names or len(names) - 1 < num_levels:
        raise ConfigError(
            f"{owner}: needs 'mask_features' and {num_levels} other map(s), but the neck gives {', '.join(names)}. "
            "Choose a pixel decoder: model.neck=FPNPixelDecoder, TransformerPixelDecoder or DeformablePixelDecoder."
        )
