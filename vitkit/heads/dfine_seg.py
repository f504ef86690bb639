"""The semantic form of D-FINE-seg (2026, https://arxiv.org/abs/2602.23043); for instances see `PyramidMasks`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vitkit.nn.mask_features import ConvGroupNorm
from vitkit.nn.query_masks import MaskPyramid
from vitkit.registry import HEADS
from vitkit.structures import FINER, FeatureInfo


@HEADS.register
class DFINESegHead(nn.Module):
    """Classifies the pixels of D-FINE-seg's mask features by convolutions, without queries.

    In training, a second classifier supervises the finest map of the encoder directly.

    Args:
        feature_info: description of the encoder's maps, fine to coarse; before these "finer", a map of the backbone, if
            the encoder passes one on (size N). Classes are predicted at twice the first map's size.
        num_classes: number of classes of the pixels.
        mask_channels: channels of the mask features, a multiple of 32.
        channels: those of the convolutions before both classifiers, a multiple of 32.
        dropout: probability that a channel of a classifier's input is set to 0 in training.
    """

    def __init__(
        self,
        feature_info: Mapping[str, FeatureInfo],
        num_classes: int,
        *,
        mask_channels: int = 256,
        channels: int = 128,
        dropout: float = 0.1,
    ):
        super().__init__()
        # Named as in a detector with `PyramidMasks`, so that training can start from its weights.
        self.mask_head = nn.ModuleDict({"pyramid": MaskPyramid(feature_info, mask_channels)})
        self.convs = nn.ModuleList(
            ConvGroupNorm(in_channels, channels, 3, relu=True) for in_channels in (mask_channels, channels)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.predictor = nn.Conv2d(channels, num_classes, kernel_size=1)
        self.finest_encoded = next(name for name in feature_info if name != FINER)
        self.aux_conv = ConvGroupNorm(feature_info[self.finest_encoded].channels, channels, 3, relu=True)
        self.aux_predictor = nn.Conv2d(channels, num_classes, kernel_size=1)

    def forward(self, features: Mapping[str, Tensor], padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Classify pixels.

        Args:
            features: the encoder's maps, (B, _, h, w).
            padding_mask: (B, H, W) bool at the size of the images, True = padding, which then affects no other pixel;
                None: it is treated like the image.
        Returns:
            pred_semantic: (B, num_classes, 2 * h, 2 * w) logits at twice the first map's size.
            aux_outputs: only in training: one dict with pred_semantic, (B, num_classes, h, w) logits at the size of the
                encoder's finest map.
        """
        x = self.mask_head["pyramid"](features, padding_mask)
        for conv in self.convs:
            x = conv(x, padding_mask)
        outputs: dict[str, Any] = {"pred_semantic": self.predictor(self.dropout(x))}
        if self.training:
            x = self.aux_conv(features[self.finest_encoded], padding_mask)
            outputs["aux_outputs"] = [{"pred_semantic": self.aux_predictor(self.dropout(x))}]
        return outputs
