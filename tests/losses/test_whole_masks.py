import pytest
import torch

from vitkit.kernels.whole_mask_losses import whole_mask_losses
from vitkit.losses.mask_criterion import matched_masks


def test_very_sure_predictions_give_finite_losses_and_gradients():
    logits = torch.full((2, 3, 4), 200.0) * torch.tensor([1.0, -1.0])[:, None, None]
    logits.requires_grad_()
    focal, dice = whole_mask_losses(logits, torch.ones(2, 6, 8, dtype=torch.bool))
    assert focal.tolist() == pytest.approx([0, 0.25 * 200])
    assert dice.tolist() == pytest.approx([0, 1 - 1 / 49])
    (focal.sum() + dice.sum()).backward()
    assert logits.grad.isfinite().all()


def test_only_matched_masks_are_computed_and_of_every_layer():
    features = torch.randn(2, 4, 3, 5)
    layers = [dict(mask_embed=torch.randn(2, 6, 4), mask_features=features) for _ in range(3)]
    nothing = torch.zeros(0, dtype=torch.int64)
    for first, second in (([[5, 0], [1, 2], [3, 3]], None), ([[5], [1], [2]], [[0], [4], [1]])):
        of_second = [torch.tensor(q) for q in second] if second else [nothing] * 3
        matches = [[(torch.tensor(a), nothing), (b, nothing)] for a, b in zip(first, of_second)]
        whole = [dict(pred_masks=torch.einsum("bqc,bchw->bqhw", x["mask_embed"], features)) for x in layers]
        got = matched_masks(layers, matches)
        assert len(got) == 3
        for mine, plain, layer, pairs in zip(got, matched_masks(whole, matches), whole, matches):
            expected = torch.cat([layer["pred_masks"][i, query] for i, (query, _) in enumerate(pairs)])
            torch.testing.assert_close(mine, expected)
            torch.testing.assert_close(plain, expected)
