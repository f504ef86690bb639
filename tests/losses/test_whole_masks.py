import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from vitkit.heads.mask_predictions import MaskPredictions
from vitkit.losses import masks as mask_losses
from vitkit.losses.mask_criterion import matched_masks
from vitkit.losses.masks import dice_loss, enlargement, whole_mask_losses


def at_full_size(logits, masks, size):
    """Both losses by the published steps: enlarge, then compare place by place."""
    wanted = [F.pad(m, (0, size[1] - m.shape[2], 0, size[0] - m.shape[1])) for m in masks]
    wanted = torch.cat(wanted).to(logits.dtype).flatten(1)
    logits = F.interpolate(logits[:, None], size=size, mode="bilinear", align_corners=False).flatten(1)
    return sigmoid_focal_loss(logits, wanted).mean(1), dice_loss(logits, wanted)


@pytest.mark.parametrize("values_at_a_time", [1, 1 << 20])
def test_losses_and_gradients_equal_the_published_steps(monkeypatch, values_at_a_time):
    monkeypatch.setattr(mask_losses, "CHUNK_VALUES", (values_at_a_time, values_at_a_time))
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(5, 9, 12, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    masks = [torch.rand(n, h, w, generator=generator) > 0.6 for n, h, w in ((2, 33, 48), (0, 20, 20), (3, 36, 41))]
    upstream = torch.rand(2, 5, generator=generator, dtype=torch.float64)

    expected = at_full_size(logits, masks, (36, 48))
    got = whole_mask_losses(logits, masks, (36, 48))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    expected, got = (torch.autograd.grad(pair, logits, tuple(upstream))[0] for pair in (expected, got))
    torch.testing.assert_close(got, expected)


def test_very_sure_predictions_give_finite_losses_and_gradients():
    logits = torch.full((2, 3, 4), 200.0) * torch.tensor([1.0, -1.0])[:, None, None]
    logits.requires_grad_()
    focal, dice = whole_mask_losses(logits, [torch.ones(2, 6, 8, dtype=torch.bool)], (6, 8))
    assert focal.tolist() == pytest.approx([0, 0.25 * 200])
    assert dice.tolist() == pytest.approx([0, 1 - 1 / 49])
    (focal.sum() + dice.sum()).backward()
    assert logits.grad.isfinite().all()


def test_enlargement_is_linear_resizing():
    row = torch.tensor([[1.0, 5.0, 2.0]])
    assert enlargement(1, 3, row).tolist() == [[1, 1, 1]]
    expected = F.interpolate(row[None], size=7, mode="linear", align_corners=False)[0]
    torch.testing.assert_close(row @ enlargement(3, 7, row), expected)


def test_masks_that_a_matcher_asked_for_first_still_have_gradients():
    embed, features = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 4, 3, 5, requires_grad=True)
    layer = MaskPredictions(torch.randn(2, 6, 3), embed, features)
    with torch.no_grad():
        first = layer["pred_masks"]
    assert layer["pred_masks"] is first
    first.sum().backward()
    assert embed.grad.any() and features.grad.any()


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
