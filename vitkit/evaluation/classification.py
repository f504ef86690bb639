"""Accuracy and confusion matrix of image classification."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import DataError
from vitkit.evaluation.base import SampleEvaluator, require_annotations
from vitkit.evaluation.sample_statistics import ClassificationStatistics
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS
from vitkit.text_format import pluralize

NUM_BEST = 5
_MAX_NAMED = 40  # with more classes, the figure does not name them
_MAX_COUNTED = 20  # with more classes, the figure's cells show no counts


class StoredClasses(NamedTuple):
    label: int
    best: list[int]
    """The classes of the highest scores, best first, at most five."""
    scores: list[float]


@EVALUATORS.register
class ClassificationEvaluator(SampleEvaluator):
    """Top-1 and top-5 accuracy (top1 and top5, in 0..1), and the confusions between classes.

    Every image of the dataset counts once; an image without a prediction counts as wrong.

    Args:
        dataset: the evaluated dataset.
    """

    per_class_metric = "accuracy"

    needs_dataset = ("image_ids", "classes")

    def __init__(self, dataset: Dataset):
        require_annotations(dataset, "label", "ClassificationEvaluator")
        super().__init__(dataset)

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: class_scores (C,) each. Those with the same image_id, such as several views of a video, are
                averaged.
            targets: `image_id` and `label` of the same images.
        Raises:
            DataError: the number of scores is not the dataset's number of classes.
        """
        if not targets:
            return
        scores = torch.stack([prediction["class_scores"] for prediction in predictions])
        num_classes = len(self.dataset.classes)
        if scores.shape[1] != num_classes:
            raise DataError(
                f"got scores of {scores.shape[1]} classes, but the dataset has {num_classes}. Was the model built or "
                "trained for other classes?"
            )
        views = defaultdict(list)
        for target, view_scores in zip(targets, scores.float(), strict=True):
            views[target["image_id"], int(target["label"])].append(view_scores)
        scores = torch.stack([torch.stack(of_one).mean(dim=0) for of_one in views.values()])
        scores, labels = (values.tolist() for values in scores.topk(min(NUM_BEST, num_classes)))
        for (image_id, label), best, best_scores in zip(views, labels, scores):
            self.stored_predictions.setdefault(image_id, StoredClasses(label, best, best_scores))

    def confusion_matrix(self) -> np.ndarray:
        """Return the (C, C) int64 counts of images with the row's class that were classified as the column's."""
        num_classes = len(self.dataset.classes)
        matrix = np.zeros((num_classes, num_classes), np.int64)
        for prediction in self.stored_predictions.values():
            matrix[prediction.label, prediction.best[0]] += 1
        return matrix

    def statistics(self) -> ClassificationStatistics:
        ids = list(self.dataset.image_ids)
        width = min(NUM_BEST, len(self.dataset.classes))
        labels, best, scores = np.full(len(ids), -1), np.full((len(ids), width), -2), np.zeros((len(ids), width))
        for k, image_id in enumerate(ids):
            if image_id in self.stored_predictions:
                labels[k], best[k], scores[k] = self.stored_predictions[image_id]
        return ClassificationStatistics(ids, self.dataset.classes, labels, best, scores)

    def _table_lines(self) -> list[str]:
        """Return the accuracies and the most frequent confusions."""
        names, matrix = self.dataset.classes, self.confusion_matrix()
        lines = [
            f"top-1 accuracy {self.metrics['top1']:.4f}   top-5 accuracy {self.metrics['top5']:.4f}   "
            f"{len(self.dataset.image_ids)} {self.dataset.noun}, {pluralize(len(names), 'classes')}"
        ]
        wrong = matrix * (1 - np.eye(len(names), dtype=np.int64))
        for position in np.argsort(-wrong, axis=None, kind="stable")[:3]:
            row, column = np.unravel_index(position, wrong.shape)
            if wrong[row, column]:
                lines.append(f"  {wrong[row, column]} of {matrix[row].sum()} {names[row]} taken for {names[column]}")
        return lines
