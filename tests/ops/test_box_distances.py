"""Distances of edges from an initial box; numbers of the original are from weighting_function, distance2bbox and
bbox2distance of d-fine-project 1.0.0."""

import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.ops.box_distances import boxes_at_distances, distance_bins, distances_of_boxes, neighboring_bins
from vitkit.ops.boxes import cxcywh_to_xyxy

INITIAL = torch.tensor([[0.5, 0.4, 0.2, 0.1], [0.3, 0.6, 0.4, 0.2]])
BOXES_XYXY = torch.tensor([[0.36, 0.36, 0.66, 0.47], [0.1, 0.9, 0.47, 0.99]])


def test_bins_equal_the_original():
    half = [0.4422495365, 1.0800836086, 1.9999995232, 4.0]
    expected = torch.tensor([-x for x in reversed(half)] + [0.0] + half)
    torch.testing.assert_close(distance_bins(8, 4.0, 0.5), expected)
    bins = distance_bins(32, 4.0, 0.5)
    assert len(bins) == 33
    expected = torch.tensor([-4.0, -1.9999990463, -0.0759896040, 0.0, 0.1577535868, 1.7881302834, 4.0])
    torch.testing.assert_close(bins[[0, 1, 15, 16, 18, 30, 32]], expected)


@pytest.mark.parametrize("reg_max", [4, 6, 32])
def test_bins_ascend_and_are_symmetric(reg_max):
    bins = distance_bins(reg_max, 8.0, 0.5)
    assert len(bins) == reg_max + 1 and (bins.diff() > 0).all() and torch.equal(bins, -bins.flip(0))
    assert bins[reg_max // 2] == 0 and bins[-2:].tolist() == [4, 8]


@pytest.mark.parametrize("reg_max", [-1, 0, 2, 3, 5])
def test_too_few_or_an_odd_number_of_bins_is_an_error(reg_max):
    with pytest.raises(ConfigError, match=f"^reg_max={reg_max}: expected an even number of at least 4, for two bins"):
        distance_bins(reg_max, 4.0, 0.5)


@pytest.mark.parametrize(("reg_scale", "up"), [(0.0, 0.5), (4.0, -1.0)])
def test_scales_must_be_positive(reg_scale, up):
    with pytest.raises(ConfigError, match=f"reg_scale={reg_scale}, up={up}: expected positive numbers"):
        distance_bins(32, reg_scale, up)


def test_boxes_at_distances_equal_the_original():
    distances = torch.tensor([[0.0, -1.0, 2.0, 0.5], [-2.0, 3.0, -1.5, 4.0]])
    expected = torch.tensor([[0.55, 0.41875, 0.3, 0.0875], [0.325, 0.625, 0.05, 0.55]])
    torch.testing.assert_close(boxes_at_distances(INITIAL, distances, 4.0), expected)


def test_distance_zero_is_the_initial_box_and_minus_half_the_scale_its_center():
    torch.testing.assert_close(boxes_at_distances(INITIAL, torch.zeros(2, 4), 4.0), INITIAL)
    collapsed = boxes_at_distances(INITIAL, torch.full((2, 4), -2.0), 4.0)
    torch.testing.assert_close(collapsed, torch.cat([INITIAL[:, :2], torch.zeros(2, 2)], dim=1))


def test_bins_of_boxes_equal_the_original():
    left, right_weight = neighboring_bins(distances_of_boxes(INITIAL, BOXES_XYXY, 4.0), distance_bins(8, 4.0, 0.5))
    # The original marks a distance beyond the last bin by the label 7.9, which it truncates later.
    assert left.tolist() == [[5, 3, 6, 5], [4, 0, 3, 7]]
    expected = [[0.5608828, 0.0955325, 0.1303564, 0.5608828], [5.391e-07, 0.0, 0.3216495, 1.0]]
    torch.testing.assert_close(right_weight, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_distances_and_boxes_convert_back_and_forth():
    torch.manual_seed(0)
    initial, distances = torch.rand(7, 3, 4) + 0.1, torch.rand(7, 3, 4) * 4 - 1.9  # no edge beyond the center
    boxes = boxes_at_distances(initial, distances, 4.0)
    torch.testing.assert_close(distances_of_boxes(initial, cxcywh_to_xyxy(boxes), 4.0), distances, rtol=1e-4, atol=1e-5)


def test_the_weighted_mean_of_the_neighboring_bins_is_the_distance():
    bins = distance_bins(6, 4.0, 0.5)
    distances = torch.cat([torch.linspace(-4, 4, 101), bins])
    left, right_weight = neighboring_bins(distances, bins)
    assert left.min() >= 0 and left.max() == 5
    torch.testing.assert_close((1 - right_weight) * bins[left] + right_weight * bins[left + 1], distances)
    beyond_left, beyond_weight = neighboring_bins(torch.tensor([-9.0, 9.0]), bins)
    assert beyond_left.tolist() == [0, 5] and beyond_weight.tolist() == [0, 1]


def test_an_initial_box_without_area_has_finite_distances():
    distances = distances_of_boxes(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([[0.4, 0.4, 0.6, 0.6]]), 4.0)
    left, right_weight = neighboring_bins(distances, distance_bins(32, 4.0, 0.5))
    assert distances.isfinite().all() and left.tolist() == [[31] * 4] and right_weight.tolist() == [[1.0] * 4]
