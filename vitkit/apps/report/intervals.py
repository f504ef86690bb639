"""Confidence intervals of metrics over images, by the bootstrap, and over seeds.

A resample of the bootstrap (Efron 1979, https://doi.org/10.1214/aos/1176344552) draws N of the N images with
replacement.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t

LEVEL = 0.95
"""Nominal coverage of the intervals."""
NUM_RESAMPLES = 1000
NUM_RESAMPLES_LARGE = 200
"""Number of resamples for more than `LARGE` images, whose intervals are narrow."""
LARGE = 2000


class Estimate(NamedTuple):
    """A metric with its interval."""

    value: float
    """The metric; NaN if there is no data for it."""
    low: float
    high: float


def bootstrap_weights(num_images: int, num_resamples: int | None = None, *, seed: int = 0) -> np.ndarray:
    """Draw resamples of images.

    Args:
        num_images: N.
        num_resamples: R; None: 1000, or 200 for more than 2000 images.
    Returns:
        (1 + R, N) float64: how often each image counts. In the first row every image counts once, so that the first
        value of each metric is the metric itself.
    """
    if num_resamples is None:
        num_resamples = NUM_RESAMPLES if num_images <= LARGE else NUM_RESAMPLES_LARGE
    weights = np.ones((1 + num_resamples, num_images))
    if num_images:
        probabilities = np.full(num_images, 1 / num_images)
        weights[1:] = np.random.default_rng(seed).multinomial(num_images, probabilities, size=num_resamples)
    return weights


def estimate(values: np.ndarray) -> Estimate:
    """Return the metric and the percentile interval of its resamples.

    Args:
        values: (1 + R,), the first being the metric itself; resamples that are NaN are ignored.
    """
    resampled = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or not len(resampled):
        return Estimate(float(values[0]), float("nan"), float("nan"))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values[0]), float(low), float(high))


class Difference(NamedTuple):
    """The difference of a metric between two models on the same images."""

    first: float
    second: float
    difference: Estimate
    """The second model's metric minus the first's, with the interval of paired resamples."""

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.difference.low > 0 or self.difference.high < 0


def paired_difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Compare two metrics, (1 + R,) each, computed from the same resamples."""
    return Difference(float(first[0]), float(second[0]), estimate(second - first))


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of a recipe's runs, which differ in their seeds, with Student's interval; NaN for one run."""
    runs = np.asarray(values, np.float64)
    mean, degrees = float(runs.mean()), len(runs) - 1
    if degrees == 0:
        return Estimate(mean, float("nan"), float("nan"))
    margin = float(student_t.ppf((1 + LEVEL) / 2, degrees) * runs.std(ddof=1) / len(runs) ** 0.5)
    return Estimate(mean, mean - margin, mean + margin)


def difference_over_seeds(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the difference of two recipes' means over their runs, with Welch's interval (Welch 1947,
    https://doi.org/10.1093/biomet/34.1-2.28), which assumes nothing about their spreads.

    Args:
        first, second: a metric of each run, which differ in their seeds.
    Returns:
        the mean of `second` minus that of `first`; the interval is NaN if one of them has a single run.
    """
    groups = [np.asarray(values, np.float64) for values in (first, second)]
    difference = float(groups[1].mean() - groups[0].mean())
    if min(map(len, groups)) < 2:
        return Estimate(difference, float("nan"), float("nan"))
    variances = np.array([values.var(ddof=1) / len(values) for values in groups])
    total = variances.sum()
    if not total > 0:
        return Estimate(difference, difference, difference)
    degrees = total**2 / (variances**2 / [len(values) - 1 for values in groups]).sum()
    margin = float(student_t.ppf((1 + LEVEL) / 2, degrees) * total**0.5)
    return Estimate(difference, difference - margin, difference + margin)
