import pytest
import torch

from vitkit.errors import DataError
from vitkit.matchers.hungarian_masks import HungarianMaskMatcher
from vitkit.ops.masks import mask_logits


@pytest.mark.parametrize("mask_cost", ["points", "focal"])
def test_masks_and_their_factors_are_matched_equally(mask_cost):
    torch.manual_seed(0)
    features = torch.randn(2, 4, 8, 6, requires_grad=True)
    factors = [
        dict(pred_logits=torch.randn(2, 7, 4), mask_embed=torch.randn(2, 7, 4), mask_features=features)
        for _ in range(3)
    ]
    masks = [
        dict(pred_logits=x["pred_logits"], pred_masks=mask_logits(x["mask_embed"], x["mask_features"])) for x in factors
    ]
    targets = [dict(labels=torch.tensor([0, 2, 1]), masks=torch.rand(3, 30, 22) > 0.5), dict(labels=torch.zeros(0))]
    matcher = HungarianMaskMatcher(1.0, 5.0, 5.0, mask_cost=mask_cost, num_points=50)
    matches = []
    for layers in (factors, masks):
        torch.manual_seed(1)
        matches += matcher([(layers, targets)], input_size=(32, 24))
        assert all("pred_masks" not in layer for layer in factors)  # intermediate values are not kept
    for ours, theirs in zip(*matches):
        for pair, other in zip(ours, theirs):
            assert torch.equal(pair[0], other[0])
            assert torch.equal(pair[1], other[1])


def test_wrong_label_is_named_even_if_another_image_has_non_finite_costs():
    layer = dict(pred_logits=torch.zeros(2, 4, 3), pred_masks=torch.zeros(2, 4, 8, 8))
    layer["pred_logits"][0] = torch.nan
    masks = torch.ones(1, 8, 8, dtype=torch.bool)
    targets = [dict(labels=torch.tensor([label]), masks=masks) for label in (1, 5)]
    matcher = HungarianMaskMatcher(1.0, 5.0, 5.0, num_points=10)
    with pytest.raises(DataError, match=r"image 1 of the batch.* has labels \[5\]; expected 0\.\.1"):
        matcher([([layer], targets)], input_size=(8, 8))
