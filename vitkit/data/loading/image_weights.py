"""Sampling weights of images, for datasets whose classes differ widely in frequency."""

from typing import Literal

import numpy as np

from vitkit.errors import ConfigError
from vitkit.protocols.dataset import Dataset

Sampler = Literal["repeat_factor", "class_aware"]


def image_weights(dataset: Dataset, sampler: Sampler, *, repeat_threshold: float) -> np.ndarray:
    """Compute how often each image occurs in an epoch on average: (len(dataset),) float64.

    Images that are not trained on (`Dataset.training_indices`) count for nothing, and their weight is 0.

    Args:
        sampler: see `repeat_factors` and `class_aware_weights`.
    Raises:
        ConfigError: the dataset does not provide the classes that its images show, or there is none to draw.
    """
    image_classes = dataset.image_classes()
    if image_classes is None:
        raise ConfigError(
            f"data.sampler={sampler}: {type(dataset).__name__} does not list the classes in its images. "
            "Leave data.sampler out."
        )
    images, labels = image_classes
    indices = np.unique(dataset.training_indices())
    chosen = np.isin(images, indices)
    images, labels = np.searchsorted(indices, images[chosen]), labels[chosen]
    weights = np.zeros(len(dataset))
    if sampler == "repeat_factor":
        weights[indices] = repeat_factors(images, labels, len(indices), threshold=repeat_threshold)
        return weights
    if not len(images):
        raise ConfigError("data.sampler=class_aware: no training image has an object. Leave data.sampler out.")
    weights[indices] = class_aware_weights(images, labels, len(indices))
    return weights


def repeat_factors(images: np.ndarray, labels: np.ndarray, num_images: int, *, threshold: float) -> np.ndarray:
    """Compute repeat factors for images of rare classes (Gupta et al. 2019, https://arxiv.org/abs/1908.03195).

    The factor of an image is the largest among its classes of max(1, sqrt(threshold / f)), f being the fraction of
    images that show the class. The paper's threshold for LVIS is 0.001.

    Args:
        images, labels: (M,) each; a pair for each class that an image shows.
    """
    _, class_indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
    class_factors = np.sqrt(threshold * num_images / counts)
    factors = np.ones(num_images)
    np.maximum.at(factors, images, class_factors[class_indices])
    return factors


def class_aware_weights(images: np.ndarray, labels: np.ndarray, num_images: int) -> np.ndarray:
    """Compute weights that draw all classes equally often (Shen et al. 2016, https://arxiv.org/abs/1512.05830).

    A class is drawn, then one of its images. As many images are drawn as the dataset has, none of them without objects.

    Args:
        images, labels: (M,) each; a pair for each class that an image shows.
    """
    _, class_indices, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = np.zeros(num_images)
    np.add.at(weights, images, num_images / len(counts) / counts[class_indices])
    return weights


def draw(members: np.ndarray, weights: np.ndarray, total: int, random: np.random.Generator) -> np.ndarray:
    """Draw exactly `total` members in random order, each as often as its weight, rounded up or down at random.

    Args:
        members: (N,), in random order.
        weights: (N,), >= 0, with a sum near `total`, to which they are scaled.
    Returns:
        (total,) drawn members.
    """
    ends = np.cumsum(weights)
    points = (np.arange(total) + random.random()) * (ends[-1] / total)
    chosen = np.searchsorted(ends, points, side="right").clip(max=len(members) - 1)
    return random.permutation(members[chosen])
