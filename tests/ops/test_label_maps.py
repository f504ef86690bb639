import numpy as np
import pytest

from vitkit.ops.label_maps import count_values, replace_values, value_runs


def test_runs_contain_every_pixel_once():
    values, lengths = value_runs(np.array([[7, 7, 0], [0, 0, 7]]))
    assert values.tolist() == [7, 0, 7] and lengths.tolist() == [2, 3, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("shape", [(0,), (1, 1), (17, 23)])
def test_counts_equal_numpy(dtype, shape):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    for found, expected in zip(count_values(values), np.unique(values, return_counts=True)):
        assert np.array_equal(found, expected)


def test_values_without_replacement_become_the_default():
    replaced = replace_values(np.array([[9, 9, 300], [4, 0, 9]]), {9: 1, 300: 2}, dtype=np.uint8, default=255)
    assert replaced.tolist() == [[1, 1, 2], [255, 255, 1]] and replaced.dtype == np.uint8
