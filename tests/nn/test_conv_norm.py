"""Norms merged into convolutions give what norm(conv(x)) gives, values and gradients."""

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from vitkit.nn.layers import conv_norm, is_fixed
from vitkit.nn.rep_blocks import ConvNorm, RepBlock


def randomize(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5)
    return module.double()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("norm_class", [nn.BatchNorm2d, FrozenBatchNorm2d])
@pytest.mark.parametrize("training", [False, True])
def test_norm_and_convolution_equal_one_after_the_other(groups, norm_class, training):
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=groups, bias=False)
    norm = norm_class(8)
    randomize(nn.Sequential(conv, norm)).train(training)
    x = torch.randn(2, 4, 9, 7, dtype=torch.float64)
    expected = norm(conv(x))
    assert is_fixed(norm) == (norm_class is FrozenBatchNorm2d or not training)
    torch.testing.assert_close(conv_norm(x, conv, norm), expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), conv.weight)
    (merged,) = torch.autograd.grad(conv_norm(x, conv, norm).square().sum(), conv.weight)
    torch.testing.assert_close(merged, gradient)
    with torch.no_grad():
        torch.testing.assert_close(conv_norm(x, conv, norm), expected)


def test_a_trained_convolution_in_autocast_is_rounded_no_more_than_its_output_would_be():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(16, 32, 3, bias=False), FrozenBatchNorm2d(32)
    for statistics in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        statistics.uniform_(0.5, 1.5)
    x, expected = torch.randn(2, 16, 12, 12), None
    errors = []
    for enabled, compute in (
        (False, conv_norm),
        (True, conv_norm),
        (True, lambda x, conv, norm: norm(conv(x)).bfloat16()),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = compute(x, conv, norm)
        (gradient,) = torch.autograd.grad(output.float().square().sum(), conv.weight)
        expected = expected or (output.detach(), gradient)
        errors.append([float((a - b).abs().mean() / b.abs().mean()) for a, b in zip((output, gradient), expected)])
    _, (value, gradient), (value_in_steps, gradient_in_steps) = errors
    assert 0 < value < 1.2 * value_in_steps
    assert 0 < gradient < 1.2 * gradient_in_steps


def test_branches_are_merged_in_inference():
    block = randomize(RepBlock(3)).eval()
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    mask = torch.zeros(2, 6, 5, dtype=torch.bool)
    mask[1, :, 3:] = True
    for padding_mask in (None, mask):
        expected = block(x, padding_mask)  # with gradients: one after the other
        with torch.no_grad():
            torch.testing.assert_close(block(x, padding_mask)[..., :3], expected[..., :3])


def test_activation_in_place_leaves_the_input_alone():
    layer = randomize(ConvNorm(3, 3, 1, silu=True)).eval()
    x = torch.randn(1, 3, 4, 4, dtype=torch.float64)
    before = x.clone()
    with torch.no_grad():
        layer(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("make_norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
def test_hooks_see_convolution_and_norm(make_norm, trained):
    conv, norm, seen = nn.Conv2d(3, 4, 3), make_norm(4).eval(), []
    x = torch.randn(1, 3, 8, 8)
    with torch.set_grad_enabled(trained):
        expected = conv_norm(x, conv, norm)
        handle = conv.register_forward_hook(lambda *_: seen.append("conv"))
        torch.testing.assert_close(conv_norm(x, conv, norm), expected)
        handle.remove()
        norm.register_forward_hook(lambda *_: seen.append("norm"))
        torch.testing.assert_close(conv_norm(x, conv, norm), expected)
    assert seen == ["conv", "norm"]
