import pytest
import torch

from vitkit.kernels import use_kernels
from vitkit.kernels.linear import _dropout_, relu_dropout
from vitkit.nn.layers import FeedForward


def test_both_forms_keep_the_same_fraction_and_values():
    x = torch.randn(1000, 100, requires_grad=True)
    for choice in ("fast", "plain"):
        with use_kernels(choice):
            output = relu_dropout(x, 0.3)
        kept = output != 0
        assert kept.float().mean().item() == pytest.approx(0.5 * 0.7, abs=0.01)
        torch.testing.assert_close(output, kept * x / 0.7)
        (grad,) = torch.autograd.grad(output.sum(), x)
        torch.testing.assert_close(grad, kept / 0.7)


def test_fused_relu_dropout_equals_separate_layers():
    ffn = FeedForward(8, 32, dropout=0.3).train()
    x = torch.randn(4, 8, requires_grad=True)

    torch.manual_seed(0)
    kept = _dropout_(torch.ones(4, 32), 0.3)
    assert len(kept.unique()) == 2 and kept.max() == pytest.approx(1 / 0.7)
    separate = ffn.linear2(ffn.linear1(x).relu() * kept)
    expected = torch.autograd.grad(separate.square().sum(), [x, *ffn.parameters()])
    torch.manual_seed(0)
    output = ffn(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *ffn.parameters()])

    torch.testing.assert_close(output, separate)
    for got, wanted in zip(gradients, expected):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_dropout_drops_its_fraction_and_keeps_the_mean(p):
    torch.manual_seed(0)
    dropped = _dropout_(torch.ones(1000, 1001), p)
    assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=2e-3)
    assert dropped.mean().item() == pytest.approx(1, abs=2e-2)
    assert not _dropout_(torch.ones(3, 3), 1.0).any()
