"""Power laws: a known exponent is recovered, its interval covers it as often as it says, and what is none is said."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from vitkit.apps.analysis.power_law import fit_power_law

X = [500.0, 1000.0, 2000.0, 4000.0] * 2


def test_exact_power_law_is_recovered():
    law = fit_power_law(X, [3.0 * x**-0.25 for x in X])
    assert (law.scale, law.exponent) == pytest.approx((3.0, 0.25)) and law.margin < 1e-6 and law.falls
    assert law.at([16.0]) == pytest.approx([1.5])
    assert str(law) == "3 x^-b, b = 0.250 (95 % interval 0.250 to 0.250, 8 points)"


def test_interval_covers_the_exponent_in_95_percent_of_noisy_samples():
    random, covered, above = np.random.default_rng(0), 0, 0
    for _ in range(400):
        law = fit_power_law(X, 3.0 * np.array(X) ** -0.25 * np.exp(random.normal(0, 0.05, len(X))))
        low, high = law.interval
        covered += low <= 0.25 <= high
        lower, upper = law.band([4000.0])
        above += lower[0] <= 3.0 * 4000.0**-0.25 <= upper[0]
    assert 0.92 * 400 < covered < 0.98 * 400 and 0.92 * 400 < above < 0.98 * 400


def test_fit_and_interval_equal_scipys_curve_fit():
    y = 3.0 * np.array(X) ** -0.25 * np.exp(np.random.default_rng(0).normal(0, 0.05, len(X)))
    values, covariance = curve_fit(lambda log_x, a, b: a - b * log_x, np.log(X), np.log(y))
    law = fit_power_law(X, y)
    assert (np.log(law.scale), law.exponent) == pytest.approx(values)
    assert law.margin == pytest.approx(2.4469 * covariance[1, 1] ** 0.5, rel=1e-4)  # t of 6 degrees of freedom


@pytest.mark.parametrize("y", [[1.0, 1.1, 1.2, 1.3], [1.0, 0.9, 1.1, 0.95], [2.0] * 4])
def test_loss_that_does_not_fall_is_said(y):
    law = fit_power_law(X[:4], y)
    assert not law.falls
    assert str(law).startswith("no power law: it does not surely fall, exponent ") and "nan" not in str(law)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1.0, 2.0], [2.0, 1.0], r"three or more x; got 2: any two lie on one"),
        ([1.0, 2.0] * 3, [2.0, 1.0] * 3, r"three or more x; got 2"),
        ([], [], r"three or more x; got 0"),
        ([1.0, 2.0, 4.0], [2.0, 1.0, 0.0], r"positive, finite numbers; got 0"),
        ([1.0, 2.0, 4.0], [2.0, float("nan"), 1.0], r"positive, finite numbers; got nan"),
        ([1.0, 2.0, 4.0], [2.0, 1.0], r"got 3 x and 2 y"),
    ],
)
def test_points_that_have_no_power_law_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(x, y)
