"""Mask2Former (Cheng et al. 2022, https://arxiv.org/abs/2112.01527): backbone, pixel decoder, head."""

from vitkit.models.mask_classification import MaskClassification
from vitkit.registry import MODELS


@MODELS.register
class Mask2Former(MaskClassification):
    """A model that predicts a mask and its class per query; arguments and outputs are those of `MaskClassification`."""
