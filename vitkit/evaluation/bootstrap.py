"""Confidence intervals of metrics by the bootstrap over images (Efron 1979, https://doi.org/10.1214/aos/1176344552).

A resample draws N of the N images with replacement: image i then counts `weights[r, i]` times. Metrics are
computed for all resamples at once from each image's contribution, so that nothing is predicted or matched again.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy.stats import t as student_t

LEVEL = 0.95
"""Nominal coverage of the intervals."""
NUM_RESAMPLES = 1000
NUM_RESAMPLES_LARGE = 200
"""Number of resamples for more than `LARGE` images, whose intervals are narrow."""
LARGE = 2000

Values = dict[str, np.ndarray]
"""Metric -> (R,) float64; NaN where a resample has no data for the metric."""


class Scores(NamedTuple):
    """Metrics of R resamples."""

    overall: Values
    """Metrics over all images, by the names that the evaluator's `compute` uses."""
    by_class: dict[str, Values]
    """Class name -> metrics; for text, group of sentences -> metrics."""


class SampleStatistics(Protocol):
    """The contribution of each image (or sentence) to the metrics."""

    sample_ids: list
    """Ids of the N images or sentences, in the order of the weights."""
    class_names: Sequence[str]
    """Names of the classes; empty for texts."""

    def scores(self, weights: np.ndarray) -> Scores:
        """Return the metrics where image i counts weights[r, i] times, weights being (R, N) float64."""

    def sample_scores(self) -> tuple[str, np.ndarray]:
        """Return the name and the (N,) values of a metric of each single image, by which images are ranked."""


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
    """By how much a metric of one model exceeds that of another on the same images."""

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


def weighted_ratio(weights: np.ndarray, part: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the sums of `part` over those of `total`, (R, …), where image i counts weights[r, i] times.

    `part` and `total` are (N, …). The result is NaN where the total is zero.
    """
    parts, totals = (np.tensordot(weights, np.asarray(x, np.float64), 1) for x in (part, total))
    return np.divide(parts, totals, out=np.full(parts.shape, np.nan), where=totals > 0)


def mean_of_finite(values: np.ndarray) -> np.ndarray:
    """Return the means along the second dimension, ignoring NaN; NaN if there is no other value."""
    finite = np.isfinite(values)
    count = finite.sum(axis=1)
    total = np.where(finite, values, 0.0).sum(axis=1)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
