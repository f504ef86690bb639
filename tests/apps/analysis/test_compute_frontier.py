"""The scaling law and the compute frontier of synthetic runs are those of the constants that made them."""

import numpy as np
import pytest

from vitkit.apps.analysis.compute_frontier import ScalingLaw, fit_scaling_law

TRUE = ScalingLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)  # Hoffmann et al. 2022, equation 10
GRID = [(n, d) for n in 10.0 ** np.arange(6, 11) for d in 10.0 ** np.arange(7, 12)]


def runs(noise: float, seed: int = 0):
    n, d = np.array(GRID).T
    return n, d, TRUE.loss(n, d) * np.exp(np.random.default_rng(seed).normal(0, noise, len(n)))


def test_constants_of_exact_runs_are_recovered():
    fitted = fit_scaling_law(*runs(0.0), resamples=3)
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(fitted.law, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)
    assert fitted.describes_runs and fitted.is_determined
    assert fitted.law.exponents == pytest.approx((0.4516, 0.5484), abs=1e-3)


def test_optimum_has_the_least_loss_for_its_compute():
    compute = 1e20
    n, d = TRUE.optimum(compute)
    assert 6 * n * d == pytest.approx(compute)
    sizes = np.geomspace(n / 30, n * 30, 2001)
    losses = TRUE.loss(sizes, compute / (6 * sizes))
    assert sizes[losses.argmin()] == pytest.approx(n, rel=0.01) and losses.min() >= TRUE.loss(n, d) - 1e-9


def test_intervals_of_noisy_runs_hold_the_truth_and_narrow_with_the_noise():
    widths = {}
    for noise in (0.002, 0.02):
        held = []
        for seed in range(4):
            fitted = fit_scaling_law(*runs(noise, seed), resamples=50, seed=seed)
            (low, high), _ = fitted.exponent_intervals()
            held.append(low <= TRUE.exponents[0] <= high)
            (n_low, n_high), (d_low, d_high) = fitted.optimum_intervals(1e20)
            n, d = TRUE.optimum(1e20)
            held += [n_low <= n <= n_high, d_low <= d <= d_high]
            widths.setdefault(noise, []).append(high - low)
        assert np.mean(held) >= 0.7
    assert np.mean(widths[0.002]) < 0.3 * np.mean(widths[0.02])


def test_runs_that_do_not_determine_the_law_are_refused_or_said():
    n, d, loss = runs(0.0)
    for rows in (d == 1e7, n == 1e6, (d <= 1e8) & (n <= 1e8), slice(0, 6)):
        with pytest.raises(ValueError, match=r"needs runs of 3 or more N, 3 or more D and 7 or more pairs"):
            fit_scaling_law(n[rows], d[rows], loss[rows])
    with pytest.raises(ValueError, match="positive, finite"):
        fit_scaling_law([*n, 1e9], [*d, 1e9], [*loss, np.nan])
    bent = loss * np.exp(0.1 * np.sin(np.log(n)))
    twice = [np.concatenate([x, x]) for x in (n, d)]
    fitted = fit_scaling_law(*twice, np.concatenate([bent, 1.01 * bent]), resamples=2)
    assert (
        fitted.misfit > 5 * fitted.scatter == pytest.approx(5 * 0.01 / 2**0.5, rel=0.01) and not fitted.describes_runs
    )
    rng = np.random.default_rng(0)
    assert not fit_scaling_law(n, d, 2.0 + 1e-3 * rng.random(len(n)), resamples=15).is_determined
