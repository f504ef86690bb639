import pytest
import torch
import torch.nn.functional as F

from vitkit.kernels import use_kernels
from vitkit.kernels.whole_mask_losses import in_chunks, plain, whole_mask_losses
from vitkit.ops.masks import pad_masks


@pytest.mark.parametrize("values_at_a_time", [1, 1 << 20])
def test_fast_equals_plain(monkeypatch, values_at_a_time):
    monkeypatch.setattr(in_chunks, "CHUNK_VALUES", (values_at_a_time, values_at_a_time))
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(5, 9, 12, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    targets = torch.rand(5, 36, 48, generator=generator) > 0.6
    upstream = torch.rand(2, 5, generator=generator, dtype=torch.float64)

    expected = plain.whole_mask_losses(logits, targets)
    losses = whole_mask_losses(logits, targets)
    torch.testing.assert_close(losses, expected)
    expected, grads = (torch.autograd.grad(pair, logits, tuple(upstream))[0] for pair in (expected, losses))
    torch.testing.assert_close(grads, expected)


def test_plain_form_can_be_requested():
    logits, targets = torch.randn(2, 3, 4), torch.rand(2, 6, 8) > 0.5
    with use_kernels("plain"):
        losses = whole_mask_losses(logits, targets)
    for chosen, defined in zip(losses, plain.whole_mask_losses(logits, targets)):
        assert torch.equal(chosen, defined)


def test_tracing_uses_the_plain_form(monkeypatch):
    monkeypatch.setattr("torch.jit.is_tracing", lambda: True)
    logits, targets = torch.randn(2, 3, 4, requires_grad=True), torch.rand(2, 6, 8) > 0.5
    focal, _ = whole_mask_losses(logits, targets)
    assert "WholeMaskLosses" not in focal.grad_fn.name()


def test_masks_are_padded_to_the_input():
    masks = [torch.rand(n, h, w) > 0.6 for n, h, w in ((2, 33, 48), (0, 20, 20), (3, 36, 41))]
    padded = torch.cat([F.pad(m, (0, 48 - m.shape[2], 0, 36 - m.shape[1])) for m in masks])
    assert torch.equal(torch.cat([pad_masks(m, (36, 48)) for m in masks]), padded)


def test_upsampling_matrix_equals_linear_resizing():
    row = torch.tensor([[1.0, 5.0, 2.0]])
    assert in_chunks.upsampling_matrix(1, 3, row).tolist() == [[1, 1, 1]]
    expected = F.interpolate(row[None], size=7, mode="linear", align_corners=False)[0]
    torch.testing.assert_close(row @ in_chunks.upsampling_matrix(3, 7, row), expected)
