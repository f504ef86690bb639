"""Classification by the nearest neighbors, as DINO evaluates features (https://arxiv.org/abs/2104.14294)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.evaluation.frozen_features import FeatureClassifier
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS

_AT_ONCE = 1024
"""Number of images that are compared with all others at once."""


@EVALUATORS.register
class NearestNeighbors(FeatureClassifier):
    """Accuracy of a weighted vote of the nearest neighbors among the other images (knn/top1 and knn/top5, in 0..1).

    Published accuracies are of neighbors among the training images, which are more, so they are higher.

    Args:
        dataset: the evaluated dataset, with a class for each image; each is classified by all others.
        k: number of neighbors; all others, if there are fewer.
        temperature: a neighbor of cosine similarity s has the weight exp(s / temperature).
    Raises:
        ConfigError: an argument is not above 0.
    """

    prefix = "knn"

    def __init__(self, dataset: Dataset, *, k: int = 20, temperature: float = 0.07):
        super().__init__(dataset)
        if k < 1 or not temperature > 0:
            raise ConfigError(f"NearestNeighbors: got k={k}, temperature={temperature}; expected both above 0.")
        self.k, self.temperature = k, temperature

    def classify(self, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        similarities, neighbors = nearest_neighbors(features, self.k)
        return vote(similarities, labels[neighbors], num_classes, temperature=self.temperature)


def nearest_neighbors(features: Tensor, k: int, gallery: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Find the most similar images.

    Args:
        features: (N, D), of any length.
        k: number of neighbors; fewer if there are not as many.
        gallery: (M, D), features of the images to search; None: the N images themselves, each without itself.
    Returns:
        (N, k) cosine similarities, highest first, and (N, k) int64 indices into the gallery.
    """
    features = F.normalize(features, dim=1)
    others = features if gallery is None else F.normalize(gallery, dim=1)
    k = min(k, len(others) - (gallery is None))
    found = []
    for start in range(0, len(features), _AT_ONCE):
        similarities = features[start : start + _AT_ONCE] @ others.T
        if gallery is None:
            similarities.diagonal(start).fill_(-torch.inf)
        found.append(similarities.topk(k))
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def vote(similarities: Tensor, labels: Tensor, num_classes: int, *, temperature: float) -> Tensor:
    """Return the votes of neighbors for the classes, (N, num_classes), which sum to 1 for each image.

    Args:
        similarities: (N, k) cosine similarities.
        labels: (N, k) int64, the classes of the neighbors.
    """
    weights = (similarities / temperature).softmax(dim=1)
    return weights.new_zeros(len(labels), num_classes).scatter_add_(1, labels, weights)
