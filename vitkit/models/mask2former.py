"""Mask2Former: backbone, pixel decoder, head (Cheng et al. 2022, https://arxiv.org/abs/2112.01527)."""

from vitkit.models.mask_results import MaskClassifier
from vitkit.registry import MODELS


@MODELS.register
class Mask2Former(MaskClassifier):
    """A model that predicts a mask and its class per query, whose decoder attends within the previous layer's masks.

    The arguments are those of `MaskClassifier`.
    """
