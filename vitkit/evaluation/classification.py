"""Accuracy and confusion matrix of image classification."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import DataError
from vitkit.evaluation.base import SampleEvaluator, read_results, require_annotations
from vitkit.evaluation.sample_statistics import ClassificationStatistics
from vitkit.io.coco_schema import is_number
from vitkit.io.output import write_text
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS
from vitkit.text_format import pluralize

_NUM_BEST = 5


class _StoredClasses(NamedTuple):
    label: int
    best: list[int]
    """The classes of the highest scores, best first, at most five."""
    scores: list[float]


@EVALUATORS.register
class ClassificationEvaluator(SampleEvaluator):
    """Top-1 and top-5 accuracy (top1 and top5, in 0..1), and the confusions between classes.

    Every image of the dataset counts once; an image without a prediction counts as wrong.
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
        scores, labels = (values.tolist() for values in scores.topk(min(_NUM_BEST, num_classes)))
        for (image_id, label), best, best_scores in zip(views, labels, scores):
            self.stored_predictions.setdefault(image_id, _StoredClasses(label, best, best_scores))

    def confusion_matrix(self) -> np.ndarray:
        """Return the (C, C) int64 counts of images with the row's class that were classified as the column's."""
        num_classes = len(self.dataset.classes)
        matrix = np.zeros((num_classes, num_classes), np.int64)
        for prediction in self.stored_predictions.values():
            matrix[prediction.label, prediction.best[0]] += 1
        return matrix

    def statistics(self) -> ClassificationStatistics:
        ids = list(self.dataset.image_ids)
        width = min(_NUM_BEST, len(self.dataset.classes))
        labels, best, scores = np.full(len(ids), -1), np.full((len(ids), width), -2), np.zeros((len(ids), width))
        for k, image_id in enumerate(ids):
            if image_id in self.stored_predictions:
                labels[k], best[k], scores[k] = self.stored_predictions[image_id]
        return ClassificationStatistics(ids, self.dataset.classes, labels, best, scores)

    def _table_lines(self) -> list[str]:
        """Return the accuracies and the most frequent confusions."""
        names, matrix = self.dataset.classes, self.confusion_matrix()
        top1, top5, *_ = self.metrics.values()
        lines = [
            f"top-1 accuracy {top1:.4f}   top-5 accuracy {top5:.4f}   "
            f"{len(self.dataset.image_ids)} {self.dataset.noun}, {pluralize(len(names), 'classes')}"
        ]
        wrong = matrix * (1 - np.eye(len(names), dtype=np.int64))
        for position in np.argsort(-wrong, axis=None, kind="stable")[:3]:
            row, column = np.unravel_index(position, wrong.shape)
            if wrong[row, column]:
                lines.append(f"  {wrong[row, column]} of {matrix[row].sum()} {names[row]} taken for {names[column]}")
        return lines

    def write_results(self, path: str | Path) -> None:
        """Write metrics, confusion matrix and each image's best classes as JSON."""
        names, matrix = self.dataset.classes, self.confusion_matrix()
        images = [
            {
                "image_id": image_id,
                "class": names[prediction.label],
                "predicted": [names[label] for label in prediction.best],
                "scores": prediction.scores,
            }
            for image_id, prediction in self.stored_predictions.items()
        ]
        result = {**self.metrics, "classes": list(names), "confusion_matrix": matrix.tolist(), "images": images}
        write_text(Path(path), json.dumps(result))

    def load_results(self, path: str | Path) -> None:
        """Read what `write_results` wrote, in place of `update`.

        Raises:
            DataError: the file is missing or invalid, or is for other images or classes.
        """
        content = read_results(path)
        label_of = {name: label for label, name in enumerate(self.dataset.classes)}
        images = content.get("images") if isinstance(content, dict) else None
        if not isinstance(images, list):
            raise DataError(f"results '{path}': expected classes that vitkit test wrote, {{'images': [{{...}}, ...]}}.")
        dataset_ids = set(np.asarray(self.dataset.image_ids).tolist())
        for number, image in enumerate(images):
            prediction = _classes_of(image, label_of)
            if prediction is None:
                raise DataError(
                    f"results '{path}': image {number} has no image_id, or no class, predicted classes and scores of "
                    f"the dataset's {len(label_of)} classes. Give results of the config's data.val."
                )
            if image["image_id"] not in dataset_ids:
                every_id = [other.get("image_id") for other in images if isinstance(other, dict)]
                matching = sum(isinstance(other, int | str) and other in dataset_ids for other in every_id)
                raise DataError(
                    f"results '{path}': {matching} of their {len(images)} images are among the "
                    f"{len(dataset_ids)} of the data. Give results of the same images."
                )
            self.stored_predictions[image["image_id"]] = prediction


def _classes_of(image: Any, label_of: Mapping[str, int]) -> _StoredClasses | None:
    """Return the prediction in an entry of a results file, or None if the entry is invalid."""
    if not isinstance(image, dict) or not isinstance(image.get("image_id"), int | str):
        return None
    names, scores = image.get("predicted"), image.get("scores")
    are_lists = isinstance(names, list) and isinstance(scores, list)
    if not are_lists or not len(names) == len(scores) == min(_NUM_BEST, len(label_of)):
        return None
    if not all(isinstance(name, str) and name in label_of for name in (image.get("class"), *names)):
        return None
    if not all(map(is_number, scores)):
        return None
    return _StoredClasses(label_of[image["class"]], [label_of[name] for name in names], scores)
