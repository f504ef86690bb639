"""A map is sampled at points by its pixels as by its channels."""

import torch

from vitkit.kernels import use_kernels
from vitkit.kernels.shared_points import sample_shared_points


def test_values_are_those_of_the_plain_form():
    torch.manual_seed(0)
    maps, points = torch.randn(1, 5, 7, 9), torch.rand(1, 500, 2) * 1.4 - 0.2  # some outside
    with use_kernels("plain"):
        expected = sample_shared_points(maps, points)
    sampled = sample_shared_points(maps, points)
    assert sampled.shape == (1, 5, 500)
    torch.testing.assert_close(sampled, expected, atol=1e-5, rtol=0)
