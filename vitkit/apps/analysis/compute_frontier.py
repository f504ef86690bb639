"""Fit how a loss falls with parameters N and data D together, L = E + A / N^alpha + B / D^beta, and find the N and D of
the least loss for an amount of compute (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import least_squares

CONFIDENCE = 0.95
OPERATIONS = 6
"""Floating-point operations for each parameter and each token of a training (Kaplan et al. 2020, section 2.1)."""
_LEAST_POINTS = 7
"""Different (N, D) that five constants and an estimate of the scatter need."""
_LARGEST_EXPONENT = 3.0


@dataclass(frozen=True)
class ScalingLaw:
    """L = E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float | np.ndarray, tokens: float | np.ndarray) -> np.ndarray:
        """Return the loss of models by their number of parameters and of training tokens."""
        n, d = np.asarray(parameters, float), np.asarray(tokens, float)
        return self.E + self.A * n**-self.alpha + self.B * d**-self.beta

    @property
    def exponents(self) -> tuple[float, float]:
        """The exponents a and b of the optimal N ~ C^a and D ~ C^b."""
        total = self.alpha + self.beta
        return self.beta / total, self.alpha / total

    def optimum(self, compute: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the N and D with the least loss among those with 6 N D = compute (equation 4)."""
        product_nd, (a, b) = np.asarray(compute, float) / OPERATIONS, self.exponents
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return scale * product_nd**a, product_nd**b / scale


@dataclass(frozen=True)
class FittedScalingLaw:
    """The law of the least-squares fit of log L, and those of fits to bootstrap resamples of the runs."""

    law: ScalingLaw
    resamples: Sequence[ScalingLaw]
    points: int
    misfit: float
    """Root mean square of the differences of log L from the law, about the fraction of L."""
    scatter: float
    """The same between runs of one N and D, as with different seeds; nan if there are none."""

    @property
    def describes_runs(self) -> bool:
        """Whether the law is within the runs' scatter; otherwise its form is wrong, and its intervals are too
        narrow."""
        return not self.misfit > 2 * self.scatter

    def interval(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of a number; `values` has one for each resample."""
        low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)

    @property
    def is_determined(self) -> bool:
        """Whether the runs show that the loss falls with both parameters and data."""
        exponents = [self.interval([getattr(law, name) for law in self.resamples]) for name in ("alpha", "beta")]
        return all(low > 0.01 and high < 0.99 * _LARGEST_EXPONENT for low, high in exponents)

    def exponent_intervals(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the intervals of the exponents of the optimal N and D."""
        pairs = [law.exponents for law in self.resamples]
        return self.interval([a for a, _ in pairs]), self.interval([b for _, b in pairs])

    def optimum_intervals(self, compute: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the intervals of the optimal N and D."""
        pairs = [law.optimum(compute) for law in self.resamples]
        return self.interval([float(n) for n, _ in pairs]), self.interval([float(d) for _, d in pairs])

    def __str__(self) -> str:
        law = self.law
        text = f"L = {law.E:.3g} + {law.A:.3g} / N^{law.alpha:.3f} + {law.B:.3g} / D^{law.beta:.3f}"
        intervals = [
            "{} {:.3f} to {:.3f}".format(name, *self.interval([getattr(law, name) for law in self.resamples]))
            for name in ("E", "alpha", "beta")
        ]
        return f"{text} (95 % intervals: {', '.join(intervals)}; {self.points} points)"


def fit_scaling_law(
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    *,
    resamples: int = 200,
    least: float = 0.0,
    seed: int = 0,
) -> FittedScalingLaw:
    """Fit the five constants by least squares of log L, with bootstrap intervals over the runs.

    Args:
        parameters, tokens, losses: of each run, positive.
        resamples: number of fits to runs drawn with replacement.
        least: the loss that no model can be below; E is at least that.
        seed: of the draws.
    Raises:
        ValueError: there are too few different N, D or pairs of them, or a number is not positive and finite.
    """
    n, d, loss = (np.asarray(values, float) for values in (parameters, tokens, losses))
    if not len(n) == len(d) == len(loss):
        raise ValueError(f"expected as many N, D and losses; got {len(n)}, {len(d)} and {len(loss)}.")
    if not all((values > 0).all() and np.isfinite(values).all() for values in (n, d, loss)):
        raise ValueError("the law needs positive, finite numbers.")
    _check_enough(n, d)
    law = min((_fit(n, d, loss, least, start) for start in _starts(n, d, loss, least)), key=lambda pair: pair[0])[1]
    rng, drawn = np.random.default_rng(seed), []
    while len(drawn) < resamples:
        rows = rng.integers(len(n), size=len(n))
        try:
            _check_enough(n[rows], d[rows])
        except ValueError:
            continue
        drawn.append(_fit(n[rows], d[rows], loss[rows], least, law)[1])
    misfit = math.sqrt(np.mean((np.log(law.loss(n, d)) - np.log(loss)) ** 2))
    return FittedScalingLaw(law, drawn, len(n), misfit, _scatter(n, d, loss))


def _scatter(n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> float:
    runs: dict[tuple[float, float], list[float]] = {}
    for *pair, value in zip(n, d, np.log(loss)):
        runs.setdefault(tuple(pair), []).append(value)
    repeated = [values for values in runs.values() if len(values) > 1]
    squares = sum(((np.array(values) - np.mean(values)) ** 2).sum() for values in repeated)
    return math.sqrt(squares / sum(len(values) - 1 for values in repeated)) if repeated else math.nan


def _check_enough(n: np.ndarray, d: np.ndarray) -> None:
    pairs = len(set(zip(n.tolist(), d.tolist())))
    sizes, amounts = len(set(n.tolist())), len(set(d.tolist()))
    if sizes < 3 or amounts < 3 or pairs < _LEAST_POINTS:
        raise ValueError(
            f"L(N, D) needs runs of 3 or more N, 3 or more D and {_LEAST_POINTS} or more pairs of them; got {sizes}, "
            f"{amounts} and {pairs}."
        )


def _starts(n: np.ndarray, d: np.ndarray, loss: np.ndarray, least: float) -> list[ScalingLaw]:
    lowest = loss.min()
    starts = []
    for alpha, beta, fraction in product((0.3, 0.8), (0.3, 0.8), (0.3, 0.9)):
        floor = least + fraction * max(lowest - least, 0.01 * lowest)
        rest = max(float(np.median(loss)) - floor, 0.1 * lowest) / 2
        starts.append(ScalingLaw(floor, rest * np.median(n) ** alpha, rest * np.median(d) ** beta, alpha, beta))
    return starts


def _fit(n: np.ndarray, d: np.ndarray, loss: np.ndarray, least: float, start: ScalingLaw) -> tuple[float, ScalingLaw]:
    """Return the sum of squares and the law of the fit from one start."""
    # Centered, so that a change of an exponent does not change the size of its term.
    center_n, center_d = np.log(n).mean(), np.log(d).mean()
    log_n, log_d, log_loss = np.log(n) - center_n, np.log(d) - center_d, np.log(loss)

    def terms(x: np.ndarray) -> np.ndarray:
        return np.stack([np.full_like(log_n, np.exp(x[0])), np.exp(x[1] - x[3] * log_n), np.exp(x[2] - x[4] * log_d)])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.log(least + terms(x).sum(axis=0)) - log_loss

    def jacobian(x: np.ndarray) -> np.ndarray:
        e, a, b = terms(x)
        return (np.stack([e, a, b, -log_n * a, -log_d * b]) / (least + e + a + b)).T

    first = [
        math.log(max(start.E - least, 1e-9)),
        math.log(start.A) - start.alpha * center_n,
        math.log(start.B) - start.beta * center_d,
        start.alpha,
        start.beta,
    ]
    bounds = [-30.0, -30.0, -30.0, 0.0, 0.0], [10.0, 10.0, 10.0, _LARGEST_EXPONENT, _LARGEST_EXPONENT]
    clipped = np.clip(first, np.add(bounds[0], 1e-9), np.subtract(bounds[1], 1e-9))
    result = least_squares(residuals, clipped, jacobian, bounds=bounds, max_nfev=200)
    e, a, b, alpha, beta = result.x
    law = ScalingLaw(
        least + math.exp(e), math.exp(a + alpha * center_n), math.exp(b + beta * center_d), float(alpha), float(beta)
    )
    return float(result.cost), law
