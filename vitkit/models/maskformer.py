"""MaskFormer: backbone, pixel decoder, head (Cheng et al. 2021, https://arxiv.org/abs/2107.06278)."""

from vitkit.models.mask_results import MaskClassifier
from vitkit.registry import MODELS


@MODELS.register
class MaskFormer(MaskClassifier):
    """A model that predicts a mask and its class per query.

    The arguments are those of `MaskClassifier`.
    """

    cut_masks = False
