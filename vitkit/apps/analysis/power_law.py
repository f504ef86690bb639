"""Fit how a loss falls with data, parameters or compute: y = a x^-b, a straight line on logarithmic axes (Hestness et
al. 2017, https://arxiv.org/abs/1712.00409; Kaplan et al. 2020, https://arxiv.org/abs/2001.08361)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """The least-squares line of log y over log x, with its intervals at 95 % confidence.

    The intervals are those of points that scatter independently around a straight line; where the points bend, they
    are too narrow.
    """

    scale: float
    """a, the value at x = 1."""
    exponent: float
    """b, positive where y falls."""
    margin: float
    """The interval of b is exponent ± margin."""
    points: int
    center: float
    """Mean of log x."""
    spread: float
    """Sum of squared distances of log x from its mean."""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the exponent."""
        return self.exponent - self.margin, self.exponent + self.margin

    @property
    def falls(self) -> bool:
        """Whether y falls: the interval of the exponent is above 0."""
        return self.interval[0] > 0

    def at(self, x: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return y on the line at each x."""
        return self.scale * np.asarray(x, float) ** -self.exponent

    def band(self, x: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper end of the line's interval at each x."""
        distance = np.log(np.asarray(x, float)) - self.center
        factor = np.exp(self.margin * np.sqrt(self.spread / self.points + distance**2))
        return self.at(x) / factor, self.at(x) * factor

    def __str__(self) -> str:
        low, high = self.interval
        exponent = f"{self.exponent:.3f} (95 % interval {low:.3f} to {high:.3f}, {self.points} points)"
        if not self.falls:
            return f"no power law: it does not surely fall, exponent {exponent}"
        return f"{self.scale:.3g} x^-b, b = {exponent}"


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Fit y = a x^-b by least squares of the logarithms, with Student's t interval of b.

    Args:
        x: positions, positive; runs with different seeds have the same x.
        y: values, positive.
    Raises:
        ValueError: fewer than three points or different x, or a number is not positive and finite.
    """
    if len(x) != len(y):
        raise ValueError(f"expected as many y as x; got {len(x)} x and {len(y)} y.")
    if wrong := [value for value in (*x, *y) if not (value > 0 and math.isfinite(value))]:
        raise ValueError(f"a power law needs positive, finite numbers; got {wrong[0]:g}.")
    if (different := len(set(x))) < 3:
        raise ValueError(f"a power law needs points at three or more x; got {different}: any two lie on one.")
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    center = log_x.mean()
    spread = ((log_x - center) ** 2).sum()
    slope = ((log_x - center) * (log_y - log_y.mean())).sum() / spread
    residuals = log_y - log_y.mean() - slope * (log_x - center)
    error = math.sqrt((residuals**2).sum() / (len(x) - 2) / spread)
    margin = stats.t.ppf((1 + CONFIDENCE) / 2, len(x) - 2) * error
    scale = math.exp(log_y.mean() - slope * center)
    return PowerLaw(scale, 0.0 - float(slope), float(margin), len(x), float(center), float(spread))
