"""Loss functions and the criteria that combine them."""

from vitkit.losses.classification import ClassificationLoss
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.losses.set_criterion import SetCriterion

__all__ = ["ClassificationLoss", "MaskCriterion", "SetCriterion"]
