"""Batch norm with its activation against the plain modules."""

import copy

import pytest
import torch
from torch import nn

from vitkit.kernels import use_kernels
from vitkit.kernels.norm_activation import norm_relu_scale, norm_silu

CASES = [("silu", torch.contiguous_format), ("scale", torch.contiguous_format), ("scale", torch.channels_last)]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_fast_path_has_the_values_gradients_and_statistics_of_the_plain_one(kind, layout):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6)
    nn.init.uniform_(norm.weight, -1, 1)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=layout)
    scale, shift, weights = torch.tensor([-0.7]), torch.tensor([0.3]), torch.randn(2, 6, 5, 7)

    def run(choice: str) -> tuple[torch.Tensor, ...]:
        layer, leaf = copy.deepcopy(norm), x.clone().requires_grad_()
        inputs = [leaf, *layer.parameters()]
        if kind == "scale":
            inputs += [scale.clone().requires_grad_(), shift.clone().requires_grad_()]
        with use_kernels(choice):
            output = norm_silu(leaf, layer) if kind == "silu" else norm_relu_scale(leaf, layer, *inputs[3:])
        return output.detach(), *torch.autograd.grad((output * weights).sum(), inputs), *layer.buffers()

    for fast, plain in zip(run("fast"), run("plain"), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["silu", "scale"])
def test_bfloat16_is_rounded_no_more_than_by_the_plain_steps_and_stays_bfloat16(kind):
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(6), torch.randn(4, 6, 15, 17)
    weights = torch.randn_like(x)
    results = []
    for choice, dtype in (("plain", torch.float32), ("fast", torch.bfloat16), ("plain", torch.bfloat16)):
        layer, leaf = copy.deepcopy(norm), x.to(dtype).requires_grad_()
        scalars = [torch.tensor([value]).requires_grad_() for value in (-0.7123, 0.3456)][: 2 * (kind == "scale")]
        with use_kernels(choice), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = norm_silu(leaf, layer) if kind == "silu" else norm_relu_scale(leaf, layer, *scalars)
        inputs = [leaf, *layer.parameters(), *scalars]
        gradients = torch.autograd.grad((output * weights).sum(), inputs)
        assert all(gradient.dtype == value.dtype for gradient, value in zip(gradients, inputs))
        results.append([output.detach(), *gradients])
    assert results[1][0].dtype == torch.bfloat16
    for expected, fast, plain in zip(*results, strict=True):
        limit = 1.5 * (plain - expected).abs().max() + 0.01 * expected.abs().max()
        assert (fast - expected).abs().max() <= limit


def test_only_the_input_is_stored():
    norm, x = nn.BatchNorm2d(6), torch.randn(2, 6, 5, 7, requires_grad=True)
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: stored.append(tensor) or tensor, lambda tensor: tensor
    ):
        norm_silu(x, norm)

    assert [tensor.data_ptr() for tensor in stored if tensor.ndim == 4] == [x.data_ptr()]


def test_single_value_per_channel_is_refused_as_by_the_norm():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_silu(torch.randn(1, 6, 1, 1, requires_grad=True), nn.BatchNorm2d(6))


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_norm_with_a_backward_hook_is_called(register):
    norm, seen = nn.BatchNorm2d(6), []
    getattr(norm, register)(lambda *_: seen.append(1))
    norm_silu(torch.randn(2, 6, 5, 7, requires_grad=True), norm).sum().backward()
    assert seen == [1]
