"""Classification of frozen features by a linear classifier."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import ConfigError
from vitkit.evaluation.frozen_features import FeatureClassifier
from vitkit.protocols.dataset import Dataset
from vitkit.registry import EVALUATORS

_MAX_ITERATIONS = 1000
_TOLERANCE = 1e-7
"""The largest gradient of the mean loss at which the fit ends."""


@EVALUATORS.register
class LinearProbe(FeatureClassifier):
    """Accuracy of a linear classifier of frozen features (probe/top1 and probe/top5, in 0..1), by cross-validation.

    Published probes train such a classifier by SGD on augmented images, with a rate that is searched for. This one is
    the minimum of a convex function, so that nothing depends on a rate or a seed: it tells which of two backbones has
    the better features, but not their published accuracies.

    Args:
        dataset: the evaluated dataset, with a class for each image.
        folds: number of parts; the images of each are classified by what was learned from the others.
        penalty: see `fit_linear`.
    Raises:
        ConfigError: there are fewer than 2 folds, or the penalty is not above 0.
    """

    prefix = "probe"

    def __init__(self, dataset: Dataset, *, folds: int = 5, penalty: float = 1.0):
        super().__init__(dataset)
        if folds < 2 or not penalty > 0:
            raise ConfigError(
                f"LinearProbe: got folds={folds}, penalty={penalty}; expected at least 2, and a number above 0."
            )
        self.folds, self.penalty = folds, penalty

    def classify(self, features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
        folds = assign_folds(labels, min(self.folds, len(labels)))
        scores = features.new_zeros(len(features), num_classes)
        for fold in folds.unique():
            held_out = folds == fold
            weight, bias = fit_linear(features[~held_out], labels[~held_out], num_classes, penalty=self.penalty)
            scores[held_out] = F.linear(features[held_out].double(), weight, bias).softmax(dim=1).float()
        return scores


def assign_folds(labels: Tensor, folds: int) -> Tensor:
    """Return the (N,) int64 fold of each image; each fold has about as many images of a class as the others."""
    assigned = torch.empty_like(labels)
    assigned[labels.argsort(stable=True)] = torch.arange(len(labels)) % folds
    return assigned


def fit_linear(features: Tensor, labels: Tensor, num_classes: int, *, penalty: float = 1.0) -> tuple[Tensor, Tensor]:
    """Fit multinomial logistic regression to standardized features.

    It minimizes the sum of the cross-entropies plus penalty / 2 times the squared weights of the standardized features,
    like scikit-learn's LogisticRegression(C=1 / penalty).

    Args:
        features: (N, D).
        labels: (N,) int64.
    Returns:
        weight (num_classes, D) and bias (num_classes,) float64, for features as they are.
    """
    features = features.double()
    mean, std = features.mean(dim=0), features.std(dim=0, correction=0)
    # A feature that is the same in all images says nothing.
    scale = torch.where(std > 1e-12 * (1 + mean.abs()), 1 / std, 0.0)
    standardized = (features - mean) * scale
    weight = features.new_zeros(num_classes, features.shape[1]).requires_grad_()
    bias = features.new_zeros(num_classes).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=_MAX_ITERATIONS,
        tolerance_grad=_TOLERANCE,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = F.cross_entropy(F.linear(standardized, weight, bias), labels)
            loss = loss + penalty / (2 * len(labels)) * weight.square().sum()
            loss.backward()
        return loss

    optimizer.step(closure)
    weight, bias = weight.detach() * scale, bias.detach()
    return weight, bias - weight @ mean
