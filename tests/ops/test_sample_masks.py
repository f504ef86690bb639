"""Masks and maps are sampled at points as `grid_sample` does."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.ops.masks import clamp_to_centers, sample_masks, sample_points


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("shared", [True, False])
def test_pixels_are_those_of_padded_masks(mode, shared):
    torch.manual_seed(0)
    masks = torch.rand(3, 31, 47) > 0.5
    points = torch.rand(1 if shared else 3, 2000, 2) * 1.2 - 0.1  # some outside
    padded = F.pad(masks, (0, 13, 0, 9))[:, None].float()
    grid = (2 * points - 1).expand(3, -1, -1)[:, None]
    expected = F.grid_sample(padded, grid, mode=mode, align_corners=False)[:, 0, 0]
    values = sample_masks(points, masks, (40, 60), mode=mode)
    assert values.shape == (3, 2000) and values.dtype == points.dtype
    if mode == "bilinear":
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    else:  # in the middle of two pixels either may be the nearest
        assert (values == expected).float().mean() > 0.999


def test_large_masks_are_sampled_one_by_one():
    masks = torch.rand(5, 400, 700) > 0.5
    points = torch.rand(5, 100, 2)
    expected = sample_points(masks[:, None].float(), points)[:, 0]
    torch.testing.assert_close(sample_masks(points, masks, (400, 700)), expected, atol=1e-4, rtol=0)


def test_no_masks_have_no_values():
    assert sample_masks(torch.rand(1, 7, 2), torch.zeros(0, 5, 5, dtype=torch.bool), (5, 5)).shape == (0, 7)


def test_between_the_centers_of_pixels_no_padding_is_needed():
    """What stands for padding by the border where PyTorch does not have it."""
    maps, points = torch.randn(2, 3, 7, 9), torch.rand(2, 500, 2) * 1.4 - 0.2
    expected = sample_points(maps, points, padding_mode="border")
    torch.testing.assert_close(sample_points(maps, clamp_to_centers(points, (7, 9))), expected, atol=1e-5, rtol=0)
