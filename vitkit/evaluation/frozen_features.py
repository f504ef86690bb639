"""Base of evaluators of frozen features, and statistics of features without labels."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.distributed import is_main
from vitkit.errors import DataError
from vitkit.evaluation.base import SampleEvaluator, get_predicted_field
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.evaluation.sample_statistics import ClassificationStatistics
from vitkit.registry import EVALUATORS
from vitkit.text_format import pluralize


class FeatureClassifier(ClassificationEvaluator):
    """Base of evaluators that classify images by the frozen features of the other images.

    The metrics are those of `ClassificationEvaluator`, as PREFIX/top1 and PREFIX/top5.

    Args:
        dataset: the evaluated dataset, with a class for each image.
    """

    takes_outputs = True
    prefix: str

    @abstractmethod
    def classify(self, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        """Return the (N, num_classes) scores of each image, computed from the other images and their labels.

        Args:
            features: (N, D) float32.
            labels: (N,) int64.
        """

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: features (D,) each.
            targets: `image_id` and `label` of the same images.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            features = get_predicted_field(prediction, "features", type(self).__name__).float().cpu().numpy()
            self.stored_predictions.setdefault(target["image_id"], (int(target["label"]), features))

    def gather(self) -> None:
        """Move the features of all ranks to the main process, and classify each image there.

        Raises:
            DataError: there are fewer than two images.
        """
        super().gather()
        if not self.stored_predictions or not is_main():
            return
        if len(self.stored_predictions) < 2:
            raise DataError(f"evaluator {type(self).__name__}: got 1 labeled image; expected at least 2. Add some.")
        ids, (labels, features) = list(self.stored_predictions), zip(*self.stored_predictions.values())
        scores = self.classify(torch.from_numpy(np.stack(features)), torch.tensor(labels), len(self.dataset.classes))
        self.stored_predictions = {}
        super().update(
            [{"class_scores": of_image} for of_image in scores],
            [{"image_id": image_id, "label": label} for image_id, label in zip(ids, labels)],
        )

    def statistics(self) -> ClassificationStatistics:
        return super().statistics()._replace(prefix=f"{self.prefix}/")

    def table(self) -> str:
        text = super().table()
        return f"{self.prefix}: {text}" if text else ""


@EVALUATORS.register
class FeatureStatistics(SampleEvaluator):
    """Statistics of features without labels, which show a collapse; see `spread_and_rank`."""

    takes_outputs = True

    def update(self, predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Any]]) -> None:
        """Add one batch; images that were seen before are ignored.

        Args:
            predictions: features (D,) each.
            targets: `image_id` of the same images.
        """
        for prediction, target in zip(predictions, targets, strict=True):
            features = get_predicted_field(prediction, "features", type(self).__name__).float().cpu().numpy()
            self.stored_predictions.setdefault(target["image_id"], features)

    def _compute(self) -> dict[str, float]:
        if len(self.stored_predictions) < 2:
            return {"spread": -1.0, "rank": -1.0}
        spread, rank = spread_and_rank(torch.from_numpy(np.stack(list(self.stored_predictions.values()))))
        return {"spread": spread, "rank": rank}

    def _table_lines(self) -> list[str]:
        spread, rank = self.metrics["spread"], self.metrics["rank"]
        images = pluralize(len(self.stored_predictions), self.dataset.noun)
        return [f"features of {images}: spread {spread:.3f} (0: all are equal)   effective rank {rank:.1f}"]


def spread_and_rank(features: Tensor) -> tuple[float, float]:
    """Return how different features are from each other.

    Args:
        features: (N, D).
    Returns:
        spread: the standard deviation of the L2-normalized features over the images, averaged over their D values and
            multiplied by the square root of D: 0 if all are equal, about 1 if they are independent.
        rank: the effective rank (Roy and Vetterli 2007): the exponential of the entropy of the singular values of the
            same features without their mean; 1 if they lie on a line.
    """
    normalized = torch.nn.functional.normalize(features.double(), dim=1)
    centered = normalized - normalized.mean(dim=0)
    spread = centered.square().mean(dim=0).sqrt().mean() * features.shape[1] ** 0.5
    values = torch.linalg.svdvals(centered)
    shares = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
    return float(spread), float(torch.special.entr(shares).sum().exp())
