"""Metrics: `update(predictions, targets)` per batch, `gather()` over ranks, `compute() -> dict[str, float]`."""

from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.coco import CocoEvaluator

__all__ = ["ClassificationEvaluator", "CocoEvaluator"]
