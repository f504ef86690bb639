"""Per-pixel baselines of MaskFormer (Cheng et al. 2021, section 4.2, https://arxiv.org/abs/2107.06278)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.heads.maskformer import MaskFormerHead
from vitkit.nn.mask_features import check_pixel_decoder
from vitkit.ops.masks import mask_logits
from vitkit.registry import HEADS
from vitkit.structures import FeatureInfo


@HEADS.register
class PerPixelBaselineHead(nn.Module):
    """A 1x1 convolution from mask features to classes (Cheng et al. 2021, section 4.2,
    https://arxiv.org/abs/2107.06278).

    Args:
        feature_info: description of a pixel decoder's maps.
        num_classes: number of classes of the pixels.
    Raises:
        ConfigError: there is no mask-feature map.
    """

    def __init__(self, feature_info: Mapping[str, FeatureInfo], num_classes: int):
        super().__init__()
        check_pixel_decoder("PerPixelBaselineHead", feature_info, num_levels=0)
        self.predictor = nn.Conv2d(feature_info["mask_features"].channels, num_classes, kernel_size=1)
        nn.init.kaiming_normal_(self.predictor.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.predictor.bias)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Classify pixels.

        Returns:
            pred_semantic: (B, num_classes, h, w) logits.
        """
        return dict(pred_semantic=self.predictor(features["mask_features"]))


@HEADS.register
class PerPixelBaselinePlusHead(MaskFormerHead):
    """MaskFormer's decoder with one query per class, whose mask is the map of logits of that class (Cheng et al. 2021,
    section 4.2, https://arxiv.org/abs/2107.06278).

    Args:
        feature_info: description of a pixel decoder's maps: "mask_features" first, then those that the queries attend
            to.
        num_classes: number of classes of the pixels.
    Raises:
        ConfigError: there is no mask-feature map, or no other map.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        d_model: int = 256,
        num_heads: int = 8,
        d_ffn: int = 2048,
        dropout: float = 0.1,
        num_encoder_layers: int = 0,
        num_decoder_layers: int = 6,
    ):
        super().__init__(
            feature_info,
            num_classes,
            num_queries=num_classes,
            d_model=d_model,
            num_heads=num_heads,
            d_ffn=d_ffn,
            dropout=dropout,
            num_encoder_layers=num_encoder_layers,
            num_decoder_layers=num_decoder_layers,
        )
        self.class_embed = nn.Identity()  # a query's class is its number

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Classify pixels.

        Returns:
            pred_semantic: (B, num_classes, h, w) logits.
            aux_outputs: the same for each decoder layer but the last, first layer first.
        """
        outputs = super().forward(features, padding_mask)
        earlier = [mask_logits(layer["mask_embed"], layer["mask_features"]) for layer in outputs["aux_outputs"]]
        return {"pred_semantic": outputs["pred_masks"], "aux_outputs": [{"pred_semantic": x} for x in earlier]}
