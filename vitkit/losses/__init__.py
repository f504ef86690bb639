"""Loss functions and the criteria that combine them."""

from vitkit.losses.box_mask_criterion import BoxMaskCriterion
from vitkit.losses.captioning import CaptionLoss
from vitkit.losses.classification import ClassificationLoss
from vitkit.losses.dfine import DFINECriterion
from vitkit.losses.feature_distillation import FeatureDistillationLoss
from vitkit.losses.grounding import GroundingCriterion
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.losses.per_pixel import PerPixelCriterion
from vitkit.losses.reconstruction import ReconstructionLoss
from vitkit.losses.self_distillation import SelfDistillationLoss
from vitkit.losses.sequence import SequenceLoss
from vitkit.losses.set_criterion import SetCriterion

__all__ = [
    "BoxMaskCriterion",
    "CaptionLoss",
    "ClassificationLoss",
    "DFINECriterion",
    "FeatureDistillationLoss",
    "GroundingCriterion",
    "MaskCriterion",
    "PerPixelCriterion",
    "ReconstructionLoss",
    "SelfDistillationLoss",
    "SequenceLoss",
    "SetCriterion",
]
