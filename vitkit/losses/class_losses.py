"""Sigmoid class losses of a set prediction: a binary decision for every class of every query.

All take the logits (L, B, Q, C) of L decoder layers, nearly all as `MatchedLayers`, whose class weights are how often
each matched query counts, and return (L,) sums over images, queries and classes, which the criterion divides by the
number of targets. The target is positive for the label of each matched query, and negative elsewhere. Losses that
weight by the prediction treat that weight as a constant, as their use in DETRs does; only the focal loss and the
negatives of the IoU-aware one differentiate it, as published.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from vitkit.errors import ConfigError
from vitkit.losses.matched import MatchedLayers
from vitkit.registry import nearest

PUBLISHED = {
    "cross_entropy": {},
    "focal": dict(alpha=0.25, gamma=2.0),
    "varifocal": dict(alpha=0.75, gamma=2.0),
    "mal": dict(gamma=1.5),
    "iou_aware": dict(alpha=0.25, gamma=2.0),
}
"""Name of each class loss -> its arguments with the published values."""

MIN_TARGET = 0.01
"""The IoU-aware loss's target for a match that does not fit at all."""


def sigmoid_settings(class_loss: str, **settings: float | None) -> dict[str, float]:
    """Return the arguments of a class loss, with the published values for those that are None.

    Raises:
        ConfigError: the loss is unknown, or has no such argument, or a value is negative.
    """
    if class_loss not in PUBLISHED:
        raise ConfigError(f"class_loss={class_loss!r}: unknown loss. {nearest(class_loss, PUBLISHED)}")
    published = PUBLISHED[class_loss]
    configured = {name: value for name, value in settings.items() if value is not None}
    for name, value in configured.items():
        if name not in published:
            raise ConfigError(f"focal_{name}={value}: class_loss={class_loss!r} has no {name}. Leave it out.")
        if value < 0:
            raise ConfigError(f"focal_{name}={value}: expected at least 0.")
    return published | configured


def sigmoid_loss(name: str, matched: MatchedLayers, ious: Tensor, **settings: float) -> Tensor:
    """Return the sums of the loss `name` for matched queries, whose boxes have `ious` (L, M); settings as from
    `sigmoid_settings`."""
    if name == "focal":
        return focal_loss(matched, **settings)
    losses = {"varifocal": varifocal_loss, "mal": matchability_aware_loss, "iou_aware": iou_aware_loss}
    return losses[name](matched, ious, **settings)


def focal_loss(matched: MatchedLayers, *, alpha: float, gamma: float) -> Tensor:
    """Compute the sigmoid focal loss (Lin et al. 2017, https://arxiv.org/abs/1708.02002).

    Args:
        alpha: weight of the labels of matched queries; all others have 1 - alpha.
        gamma: exponent by which the loss down-weights well classified examples.
    Returns:
        (L,) sums.
    """
    class_targets = _at_labels(matched, matched.logits.new_ones(()))
    return _sum(sigmoid_focal_loss(matched.logits, class_targets, alpha=alpha, gamma=gamma), matched)


def token_focal_loss(
    logits: Tensor, query_indices: Sequence[Tensor], tokens: Tensor, padding: Tensor, *, alpha: float, gamma: float
) -> Tensor:
    """Compute the sigmoid focal loss of queries' logits for the tokens of a text, several of which may be positive.

    Args:
        logits: (L, B, Q, T), of any value for padding.
        query_indices: layer, image and query indices of the matched queries, each (L, M).
        tokens: (L, M, T) bool, the positive tokens of each matched query.
        padding: (B, T) bool, True = padding, which does not count.
        The others are as in `focal_loss`.
    Returns:
        (L,) sums.
    """
    targets = logits.new_zeros(logits.shape)
    targets[tuple(query_indices)] = tokens.to(logits.dtype)
    # Masked before the loss: the logit of padding is -inf, whose loss is not finite.
    losses = sigmoid_focal_loss(logits.masked_fill(padding[:, None], 0), targets, alpha=alpha, gamma=gamma)
    return losses.masked_fill(padding[:, None], 0).flatten(1).sum(1)


def varifocal_loss(matched: MatchedLayers, ious: Tensor, *, alpha: float, gamma: float) -> Tensor:
    """Compute the varifocal loss (Zhang et al. 2021, https://arxiv.org/abs/2008.13367, equation 2).

    With p the predicted probability and q the IoU of a matched box, a matched label costs q times the cross entropy of
    p with target q, and everything else alpha p^gamma times that with target 0. As in RT-DETR's and D-FINE's code, a
    match with IoU 0 costs nothing at its label; in the paper it counts as "no object".

    Args:
        ious: (L, M) in 0..1 of the matched boxes.
        alpha: weight of negatives.
    Returns:
        (L,) sums.
    """
    class_targets = _at_labels(matched, ious)
    probabilities = matched.logits.detach().sigmoid()
    # A matched label weighs its IoU, so well fitting boxes weigh more; its target teaches how well the box fits.
    is_matched = _at_labels(matched, matched.logits.new_ones(())) > 0
    factors = class_targets.where(is_matched, alpha * probabilities**gamma)
    losses = F.binary_cross_entropy_with_logits(matched.logits, class_targets, factors, reduction="none")
    return _sum(losses, matched)


def matchability_aware_loss(matched: MatchedLayers, ious: Tensor, *, gamma: float) -> Tensor:
    """Compute the matchability-aware loss, MAL (Huang et al. 2025, https://arxiv.org/abs/2412.04234, equation 3).

    A matched label costs the cross entropy of p with target q^gamma, whatever the IoU q, and everything else p^gamma
    times that with target 0.

    Args:
        ious: (L, M) in 0..1 of the matched boxes.
    Returns:
        (L,) sums.
    """
    class_targets = _at_labels(matched, ious**gamma)
    is_label = _at_labels(matched, matched.logits.new_ones(())) > 0
    probabilities = matched.logits.detach().sigmoid()
    # The varifocal loss nearly ignores a poorly fitting match; here it counts as much as others, which lowers a
    # confident prediction that fits badly.
    factors = (probabilities**gamma).masked_fill(is_label, 1.0)
    losses = F.binary_cross_entropy_with_logits(matched.logits, class_targets, factors, reduction="none")
    return _sum(losses, matched)


def iou_aware_loss(matched: MatchedLayers, ious: Tensor, *, alpha: float, gamma: float) -> Tensor:
    """Compute the IoU-aware binary cross entropy (Cai et al. 2023, https://arxiv.org/abs/2304.07527, equation 2).

    A matched label costs the cross entropy of p with target p^alpha q^(1 - alpha), which counts as a constant, and
    everything else p^gamma times that with target 0.

    Args:
        ious: (L, M) in 0..1 of the matched boxes.
        alpha: weight of the prediction in the target's geometric mean with the IoU q.
    Returns:
        (L,) sums.
    """
    indices = (*matched.indices, matched.labels)
    probabilities = matched.logits.sigmoid()
    targets = probabilities.detach()[indices] ** alpha * ious ** (1 - alpha)
    class_targets = _at_labels(matched, targets.clamp(min=MIN_TARGET))
    factors = (probabilities**gamma).masked_fill(class_targets > 0, 1.0)
    losses = factors * F.binary_cross_entropy_with_logits(matched.logits, class_targets, reduction="none")
    return _sum(losses, matched)


def _at_labels(matched: MatchedLayers, values: Tensor) -> Tensor:
    """Return a tensor of zeros like the logits, with values, (L, M) or one, at the labels of the matched queries; one
    is a tensor, as a number would be copied from the host, which waits for the GPU."""
    class_targets = matched.logits.new_zeros(matched.logits.shape)
    class_targets[(*matched.indices, matched.labels)] = values
    return class_targets


def _sum(losses: Tensor, matched: MatchedLayers) -> Tensor:
    if matched.class_weights is not None:
        of_queries = losses.new_ones(losses.shape[:-1])
        of_queries[tuple(matched.indices)] = matched.class_weights
        losses = losses * of_queries[..., None]
    return losses.flatten(1).sum(1)
