"""Sigmoid class losses of a set prediction: every class of every query is a yes-or-no question.

All take the logits (L, B, Q, C) of L decoder layers and return (L,) sums over images, queries and classes, which the
criterion divides by the number of targets. The answer is yes for the label of each matched query, and no elsewhere.
The losses that weigh by the prediction take that weight as a constant, as their use in DETRs does; the focal loss
differentiates it, as published.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from vitkit.errors import ConfigError
from vitkit.registry import nearest

PUBLISHED = {
    "cross_entropy": {},
    "focal": dict(alpha=0.25, gamma=2.0),
    "varifocal": dict(alpha=0.75, gamma=2.0),
    "mal": dict(gamma=1.5),
}
"""Class losses and their arguments with the published values."""


def sigmoid_settings(class_loss: str, **settings: float | None) -> dict[str, float]:
    """Return the arguments of a class loss: those given, and for None the published ones.

    Raises:
        ConfigError: the loss is unknown, or has no such argument, or it is negative.
    """
    if class_loss not in PUBLISHED:
        raise ConfigError(f"criterion.class_loss: unknown loss {class_loss!r}. {nearest(class_loss, PUBLISHED)}")
    published = PUBLISHED[class_loss]
    chosen = {name: value for name, value in settings.items() if value is not None}
    for name, value in chosen.items():
        if name not in published:
            raise ConfigError(f"criterion.focal_{name}={value}: class_loss={class_loss!r} has none. Leave it out.")
        if value < 0:
            raise ConfigError(f"criterion.focal_{name}: got {value}; expected at least 0.")
    return published | chosen


def sigmoid_loss(
    name: str, logits: Tensor, where: Sequence[Tensor], labels: Tensor, ious: Tensor, **settings: float
) -> Tensor:
    """Return the sums of the loss of that name; arguments as of `varifocal_loss`, settings of `sigmoid_settings`."""
    if name == "focal":
        return focal_loss(logits, where, labels, **settings)
    loss = {"varifocal": varifocal_loss, "mal": matchability_aware_loss}[name]
    return loss(logits, where, labels, ious, **settings)


def focal_loss(logits: Tensor, where: Sequence[Tensor], labels: Tensor, *, alpha: float, gamma: float) -> Tensor:
    """Sigmoid focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002).

    Args:
        logits: (L, B, Q, C).
        where: layer, image and query of the matched ones, each (L, M).
        labels: (L, M) int64.
        alpha: weight of the labels of matched queries; all others have 1 - alpha.
        gamma: exponent by which the loss reduces what is well classified.
    Returns:
        (L,) sums.
    """
    answers = _at_labels(logits, where, labels, 1.0)
    return _sum(sigmoid_focal_loss(logits, answers, alpha=alpha, gamma=gamma))


def varifocal_loss(
    logits: Tensor, where: Sequence[Tensor], labels: Tensor, ious: Tensor, *, alpha: float, gamma: float
) -> Tensor:
    """Varifocal loss (Zhang et al. 2021, https://arxiv.org/abs/2008.13367, equation 2).

    With p the predicted probability and q the IoU of a matched box, a label costs q times the cross entropy of p with
    the answer q, and everything else, a match of IoU 0 included, alpha p^gamma times that with the answer 0. So a query
    learns to predict how well its box fits, and well fitting ones weigh more.

    Args:
        ious: (L, M) in 0..1 of the matched boxes; the others as of `focal_loss`.
        alpha: weight of what is no object.
    Returns:
        (L,) sums.
    """
    answers = _at_labels(logits, where, labels, ious)
    probabilities = logits.detach().sigmoid()
    weights = answers.where(answers > 0, alpha * probabilities**gamma)
    return _sum(F.binary_cross_entropy_with_logits(logits, answers, weights, reduction="none"))


def matchability_aware_loss(
    logits: Tensor, where: Sequence[Tensor], labels: Tensor, ious: Tensor, *, gamma: float
) -> Tensor:
    """Matchability-aware loss, MAL (Huang et al. 2025, https://arxiv.org/abs/2412.04234, equation 3).

    A label costs the cross entropy of p with the answer q^gamma, whatever the IoU q, and everything else p^gamma times
    that with the answer 0. The varifocal loss all but ignores a poorly fitting match; here it counts as much as others,
    which lowers a confident prediction that fits badly.

    Args:
        ious: (L, M) in 0..1 of the matched boxes; the others as of `focal_loss`.
    Returns:
        (L,) sums.
    """
    answers = _at_labels(logits, where, labels, ious**gamma)
    is_label = _at_labels(logits, where, labels, 1.0) > 0
    probabilities = logits.detach().sigmoid()
    weights = (probabilities**gamma).masked_fill(is_label, 1.0)
    return _sum(F.binary_cross_entropy_with_logits(logits, answers, weights, reduction="none"))


def _at_labels(logits: Tensor, where: Sequence[Tensor], labels: Tensor, values: Tensor | float) -> Tensor:
    """Return zeros like the logits, with the values at the labels of the matched queries."""
    answers = logits.new_zeros(logits.shape)
    answers[(*where, labels)] = values
    return answers


def _sum(losses: Tensor) -> Tensor:
    return losses.flatten(1).sum(1)
