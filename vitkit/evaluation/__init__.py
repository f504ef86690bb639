"""Metrics: `update(predictions, targets)` per batch, `gather()` over ranks, `compute() -> dict[str, float]`.

They also write predictions, `write_results(path)`, and most can evaluate such a file, `load_results(path)`.
"""

from vitkit.evaluation.captions import CaptionEvaluator
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.combined import CombinedEvaluator
from vitkit.evaluation.frozen_features import FeatureStatistics
from vitkit.evaluation.grounding import GroundingEvaluator
from vitkit.evaluation.linear_probe import LinearProbe
from vitkit.evaluation.lvis import LvisEvaluator
from vitkit.evaluation.nearest_neighbours import NearestNeighbours
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.evaluation.text import LanguageModelEvaluator, TextEvaluator

__all__ = [
    "CaptionEvaluator",
    "ClassificationEvaluator",
    "CocoEvaluator",
    "CombinedEvaluator",
    "FeatureStatistics",
    "GroundingEvaluator",
    "LanguageModelEvaluator",
    "LinearProbe",
    "LvisEvaluator",
    "NearestNeighbours",
    "PanopticEvaluator",
    "SemanticEvaluator",
    "TextEvaluator",
]
