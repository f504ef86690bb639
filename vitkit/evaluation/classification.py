"""Accuracy and confusions of image classification."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from vitkit.distributed import gather_objects, is_main
from vitkit.errors import DataError
from vitkit.registry import EVALUATORS

_KEPT = 5
_MOST_NAMED = 40  # more classes are not named in the picture
_MOST_COUNTED = 20  # nor are images counted in its fields


class ClassifiedDataset(Protocol):
    """What the evaluator asks of a dataset."""

    classes: Sequence[str]
    image_ids: Sequence[Any]


class _Answer(NamedTuple):
    label: int
    best: list[int]
    """The classes of the highest scores, best first, at most five."""
    scores: list[float]


@EVALUATORS.register
class ClassificationEvaluator:
    """Top-1 and top-5 accuracy, and which classes are taken for which.

    Every image of the dataset counts once: one without a prediction counts as wrong.

    Args:
        dataset: the evaluated dataset.
    """

    per_class_metric = "accuracy"
    """What `per_class` gives."""

    def __init__(self, dataset: ClassifiedDataset):
        self.dataset = dataset
        self._answers: dict[Any, _Answer] = {}
        self._metrics: dict[str, float] = {}

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Takes one batch; an image that was seen before is left out.

        Args:
            predictions: class_scores (C,) each.
            targets: the same images' `image_id` and `label`.
        Raises:
            DataError: there are not as many scores as the dataset has classes.
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
        scores, labels = (found.tolist() for found in scores.float().topk(min(_KEPT, num_classes)))
        for target, best, of_best in zip(targets, labels, scores, strict=True):
            self._answers.setdefault(target["image_id"], _Answer(int(target["label"]), best, of_best))

    def gather(self) -> None:
        """Moves the predictions of all ranks to the main process; an image that several ranks saw is kept once."""
        merged = {}
        for answers in gather_objects(self._answers):
            merged = answers | merged
        if is_main():
            self._answers = merged

    def compute(self) -> dict[str, float]:
        """The metrics "top1" and "top5" in 0..1, on the main process; an empty dict elsewhere."""
        if not is_main():
            return {}
        answers, num_images = self._answers.values(), len(self.dataset.image_ids)
        top1 = sum(answer.label == answer.best[0] for answer in answers)
        top5 = sum(answer.label in answer.best for answer in answers)
        self._metrics = {"top1": top1 / num_images, "top5": top5 / num_images}
        return dict(self._metrics)

    def confusion_matrix(self) -> np.ndarray:
        """(C, C) int64: images of the row's class that were taken for the column's."""
        num_classes = len(self.dataset.classes)
        matrix = np.zeros((num_classes, num_classes), np.int64)
        for answer in self._answers.values():
            matrix[answer.label, answer.best[0]] += 1
        return matrix

    def table(self) -> str:
        """The accuracies of the last `compute()` and the most frequent confusions; empty on other processes."""
        if not self._metrics:
            return ""
        names, matrix = self.dataset.classes, self.confusion_matrix()
        lines = [
            f"top-1 accuracy {self._metrics['top1']:.4f}   top-5 accuracy {self._metrics['top5']:.4f}   "
            f"{len(self.dataset.image_ids)} images, {len(names)} classes"
        ]
        wrong = matrix * (1 - np.eye(len(names), dtype=np.int64))
        for place in np.argsort(-wrong, axis=None, kind="stable")[:3]:
            row, column = np.unravel_index(place, wrong.shape)
            if wrong[row, column]:
                lines.append(f"  {wrong[row, column]} of {matrix[row].sum()} {names[row]} taken for {names[column]}")
        return "\n".join(lines)

    def per_class(self) -> dict[str, float]:
        """Class name -> part of its images that are right, -1 for a class without images."""
        matrix = self.confusion_matrix()
        right, all_ = matrix.diagonal(), matrix.sum(axis=1)
        return {name: float(r / n) if n else -1.0 for name, r, n in zip(self.dataset.classes, right, all_)}

    def write_results(self, path: str | Path) -> list[Path]:
        """Writes metrics, confusion matrix and best classes of each image as JSON, and the matrix as a picture.

        Returns:
            the files: `path`, and NAME_confusion.png for NAME.json.
        """
        path, names = Path(path), self.dataset.classes
        matrix = self.confusion_matrix()
        images = [
            {
                "image_id": image_id,
                "class": names[answer.label],
                "predicted": [names[label] for label in answer.best],
                "scores": answer.scores,
            }
            for image_id, answer in self._answers.items()
        ]
        result = {**self._metrics, "classes": list(names), "confusion_matrix": matrix.tolist(), "images": images}
        path.write_text(json.dumps(result), encoding="utf-8")
        picture = path.with_name(f"{path.stem}_confusion.png")
        draw_confusion_matrix(matrix, names, picture)
        return [path, picture]


def draw_confusion_matrix(
    matrix: np.ndarray, class_names: Sequence[str], path: str | Path, *, what: str = "images"
) -> None:
    """Saves a PNG: a row for each class, its images' parts by predicted class, from white to dark.

    Args:
        matrix: (C, C) counts, rows true, columns predicted.
        class_names: C names, written where there are few.
        path: of the PNG.
        what: is counted.
    """
    num_classes = len(class_names)
    parts = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = min(4.0 + 0.3 * num_classes, 12.0)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    # Confusions are rare, and a linear scale would show the diagonal alone.
    least = 10 ** np.floor(np.log10(1 / max(matrix.sum(axis=1).max(), 10)))
    shown = axes.imshow(np.where(parts > 0, parts, np.nan), cmap="Blues", norm=LogNorm(least, 1.0))
    figure.colorbar(shown, ax=axes, label=f"part of the class's {what}", shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true", title=f"{int(matrix.trace())} of {int(matrix.sum())} {what} right")
    if num_classes <= _MOST_NAMED:
        axes.set_xticks(range(num_classes), class_names, rotation=90)
        axes.set_yticks(range(num_classes), class_names)
    if num_classes <= _MOST_COUNTED:
        for row, column in np.argwhere(matrix):
            color = "white" if shown.norm(parts[row, column]) > 0.6 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=color)
    figure.savefig(path, dpi=120, format="png")
