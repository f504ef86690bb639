"""MaskFormer (Cheng et al. 2021, https://arxiv.org/abs/2107.06278): backbone, pixel decoder, head."""

from vitkit.models.mask_classification import MaskClassification
from vitkit.registry import MODELS


@MODELS.register
class MaskFormer(MaskClassification):
    """A model that predicts a mask and its class per query; arguments and outputs are those of `MaskClassification`."""

    cut_masks = False
