import pytest
import torch

from vitkit.apps.explanations.images import LayerAttention, QueryPredictions
from vitkit.apps.explanations.regions import attention_ratio, box_region, sampling_ratio


def test_uniform_attention_has_the_ratio_one_in_any_region():
    region = torch.zeros(13, 22, dtype=torch.bool)
    region[3:8, 5:6] = True
    assert attention_ratio(torch.full((2, 13, 11), 0.1), region) == pytest.approx([1.0, 1.0])


def test_attention_inside_the_region_is_relative_to_its_area():
    region = box_region([0, 0, 40, 10], (20, 40))  # the upper half
    maps = torch.tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.5], [0.0, 0.0]], [[0.0, 0.0], [2.0, 1.0]]])
    assert attention_ratio(maps, region) == pytest.approx([0.3 / 0.5, 2.0, 0.0])


def test_a_cell_that_is_half_in_the_region_counts_half():
    region = box_region([0, 0, 10, 20], (20, 40))  # half of the left cells
    maps = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    assert float(attention_ratio(maps, region)) == pytest.approx(0.5 * 0.4 / 0.25)


def test_padding_is_no_part_of_the_region():
    region = box_region([20, 0, 40, 20], (20, 40))  # the right half of the image
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])  # the right column and the lower row are padding
    assert float(attention_ratio(weights, region, covered=(2.0, 1.5))) == pytest.approx(1.0)


def test_a_box_region_is_cut_to_the_image_and_never_empty():
    assert box_region([-5.0, 2.4, 1.2, 9.0], (4, 6)).nonzero().tolist() == [[2, 0], [2, 1], [3, 0], [3, 1]]
    assert box_region([7.0, 1.0, 9.0, 1.0], (4, 6)).nonzero().tolist() == [[1, 5]]


def test_sampling_points_in_a_box_count_by_weight():
    locations = torch.tensor([[[0.1, 0.1], [0.6, 0.6]], [[0.7, 0.9], [1.2, 0.6]]])  # 2 heads with 2 points
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    box = torch.tensor([0.75, 0.75, 0.5, 0.5])
    assert sampling_ratio(locations, weights, box) == pytest.approx([3.0, 2.0])
    # The part of the box outside the image does not add to its area.
    assert sampling_ratio(locations, weights, torch.tensor([1.0, 0.75, 1.0, 0.5])) == pytest.approx([3.0, 2.0])


def test_a_layer_measures_each_head_and_a_query_with_a_mask_uses_it():
    heads = torch.tensor([[[[1.0, 0.0]]], [[[0.5, 0.5]]]])  # 2 heads, 1 query, a map of 1 x 2
    boxes, masks = torch.tensor([[0.0, 0.0, 8.0, 4.0]]), torch.tensor([[[True, False]]])
    by_box, by_mask = (
        QueryPredictions(torch.ones(1), torch.zeros(1), boxes, m, (4, 8)).region(0) for m in (None, masks)
    )
    layer = LayerAttention(0, heads, (1.0, 1.0))
    assert layer.ratios(0, by_box) == pytest.approx([1.0, 1.0])
    assert layer.ratios(0, by_mask) == pytest.approx([2.0, 1.0])
