import pytest
import torch

from vitkit.kernels.whole_mask_losses import whole_mask_losses
from vitkit.losses.mask_criterion import compute_matched_masks


def test_very_confident_predictions_give_finite_losses_and_gradients():
    logits = torch.full((2, 3, 4), 200.0) * torch.tensor([1.0, -1.0])[:, None, None]
    logits.requires_grad_()
    focal, dice = whole_mask_losses(logits, torch.ones(2, 6, 8, dtype=torch.bool))
    assert focal.tolist() == pytest.approx([0, 0.25 * 200])
    assert dice.tolist() == pytest.approx([0, 1 - 1 / 49])
    (focal.sum() + dice.sum()).backward()
    assert logits.grad.isfinite().all()


def test_only_matched_masks_of_every_layer_are_computed():
    features = torch.randn(2, 4, 3, 5)
    layers = [dict(mask_embed=torch.randn(2, 6, 4), mask_features=features) for _ in range(3)]
    for counts, queries in (([2, 0], [[5, 0], [1, 2], [3, 3]]), ([1, 1], [[5, 0], [1, 4], [2, 1]])):
        image, query = torch.repeat_interleave(torch.arange(2), torch.tensor(counts)), torch.tensor(queries)
        whole = [dict(pred_masks=torch.einsum("bqc,bchw->bqhw", x["mask_embed"], features)) for x in layers]
        got, plain = (compute_matched_masks(x, image, query, counts) for x in (layers, whole))
        assert len(got) == len(plain) == 3
        for i in range(3):
            expected = whole[i]["pred_masks"][image, query[i]]
            torch.testing.assert_close(got[i], expected)
            torch.testing.assert_close(plain[i], expected)
