"""Metrics of resampled images: image i counts `weights[r, i]` times in resample r.

They are computed for all resamples at once from each image's contribution, so that nothing is predicted or matched
again; `vitkit.apps.report.intervals` draws resamples for confidence intervals.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

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
