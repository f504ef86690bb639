"""The interval of a difference over seeds, beside scipy's test."""

import numpy as np
import pytest
from scipy import stats

from vitkit.apps.report.intervals import difference_over_seeds


@pytest.mark.parametrize("sizes", [(2, 2), (3, 5), (10, 4)])
def test_the_interval_is_that_of_welchs_test(sizes):
    random = np.random.default_rng(sum(sizes))
    first, second = random.normal(0.5, 0.01, sizes[0]), random.normal(0.53, 0.05, sizes[1])
    expected = stats.ttest_ind(second, first, equal_var=False).confidence_interval(0.95)
    value, low, high = difference_over_seeds(first, second)
    assert value == pytest.approx(second.mean() - first.mean())
    assert (low, high) == pytest.approx((expected.low, expected.high))


def test_one_seed_has_no_interval_and_equal_seeds_no_width():
    value, low, high = difference_over_seeds([0.5], [0.6, 0.7])
    assert value == pytest.approx(0.15) and np.isnan([low, high]).all()
    assert difference_over_seeds([0.5, 0.5], [0.75, 0.75]) == (0.25, 0.25, 0.25)
