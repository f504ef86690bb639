"""Federated loss: each step has class losses of only some classes (Zhou et al. 2021, https://arxiv.org/abs/2103.07461).

With more than a thousand classes, an image of a federated dataset (LVIS) is annotated for a few, and a rare class is
otherwise taught hardly anything but "no".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkit.errors import ConfigError

NOT_COUNTED = -1e4
"""A logit of a class that is no target and does not count: the probability, and with it every sigmoid loss, is 0."""


def make_class_frequencies(image_counts: Sequence[float] | None) -> Tensor | None:
    """Return how often classes are sampled, (C,) float32, proportional to the square root of their number of images.

    Raises:
        ConfigError: a number is negative.
    """
    if image_counts is None:
        return None
    counts = torch.tensor(list(image_counts), dtype=torch.float32)
    if not bool((counts >= 0).all()):
        raise ConfigError(f"image_counts={list(image_counts)!r:.100}: expected numbers of images, at least 0.")
    return counts.sqrt()


def sample_classes(labels: Tensor, frequencies: Tensor, num_classes: int) -> Tensor:
    """Return the classes of a step: those that are present, and others, drawn without replacement, up to a number.

    Args:
        labels: (N,) int64, the labels of all targets.
        frequencies: (C,) how often each class is drawn, relative to others; one of 0 only if it is present.
        num_classes: number of classes of the step, unless more are present.
    Returns:
        (C,) bool.
    """
    # The largest quotients are a sample without replacement, as by torch.multinomial, which would wait for the GPU.
    order = frequencies / torch.empty_like(frequencies).exponential_()
    order[labels] = torch.inf
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen[order.topk(min(num_classes, len(order))).indices] = True
    chosen &= order > 0
    chosen[labels] = True
    return chosen
