import pytest
import torch

from vitkit.kernels import use_kernels
from vitkit.kernels.attention import attend_explicit, scaled_dot_product_attention


@pytest.mark.parametrize("learned", [False, True])
def test_fast_equals_plain(learned):
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7))
    for shape in ((5, 7), (2, 1, 1, 7), (2, 3, 5, 7)):
        bias = torch.randn(shape, requires_grad=learned)
        inputs = [q, k, v, *([bias] if learned else [])]
        outputs = [scaled_dot_product_attention(q, k, v, bias, scale=0.3), attend_explicit(q, k, v, bias, scale=0.3)[0]]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in outputs))


def test_plain_form_can_be_requested():
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    torch.manual_seed(0)
    with use_kernels("plain"):
        chosen = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(chosen, attend_explicit(q, k, v, dropout_p=0.5)[0])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_keys", [9, 40])
def test_dropout_applies_to_the_weights_and_their_gradients(num_keys, with_bias):
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64) for length in (5, num_keys, num_keys))
    bias = torch.randn(2, 1, 1, num_keys, dtype=torch.float64) if with_bias else None
    inputs = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(1)
    # Values of one channel for each key show the weights after dropout.
    shown = scaled_dot_product_attention(
        q, k, torch.eye(num_keys, dtype=torch.float64).expand(2, 3, -1, -1), bias, dropout_p=0.3
    )
    dropped = shown == 0
    assert 0.15 < dropped.double().mean() < 0.45

    torch.manual_seed(1)
    output = scaled_dot_product_attention(*inputs, bias, dropout_p=0.3)
    _, weights = attend_explicit(*inputs, bias)
    expected = weights.masked_fill(dropped, 0) / 0.7 @ v
    torch.testing.assert_close(output, expected)
    direction = torch.randn_like(output)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for found, want in zip(torch.autograd.grad(output, inputs, direction), wanted):
        torch.testing.assert_close(found, want)


def test_dropout_saves_a_single_tensor_of_the_size_of_the_weights():
    q, k, v = (torch.randn(1, 2, 64, 8, requires_grad=True) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    assert [size for size in kept if size >= 2 * 64 * 64] == [2 * 64 * 64]


@pytest.mark.parametrize("with_bias", [False, True])
def test_bfloat16_trains_with_the_float32_kernel_on_a_cpu(with_bias):
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.bfloat16, requires_grad=True) for length in (5, 7, 7))
    bias = torch.randn(2, 1, 1, 7) if with_bias else None
    with torch.autocast("cpu", torch.bfloat16):
        output = scaled_dot_product_attention(q, k, v, bias)
    precise = scaled_dot_product_attention(
        q.float(), k.float(), v.float(), None if bias is None else bias.bfloat16().float()
    )
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, precise.bfloat16())  # rounded only once
    direction = torch.randn_like(output)
    gradients = torch.autograd.grad(output, (q, k, v), direction)
    expected = torch.autograd.grad(precise, (q, k, v), direction.float())
    assert all(torch.equal(gradient, value) for gradient, value in zip(gradients, expected))


def test_dropout_in_bfloat16_drops_the_same_weights_with_the_same_gradients():
    q, k, v = (torch.randn(2, 3, length, 8).bfloat16().requires_grad_() for length in (20, 30, 30))
    bias = torch.zeros(2, 1, 1, 30).masked_fill(torch.arange(30) > 25, -torch.inf)
    direction = torch.randn(2, 3, 20, 8)
    results = []
    for inputs in ((q, k, v), tuple(x.detach().float().requires_grad_() for x in (q, k, v))):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=inputs[0].dtype == torch.bfloat16):
            output = scaled_dot_product_attention(*inputs, bias, dropout_p=0.3)
            # A backward pass inside autocast computes in the same dtypes.
            gradients = torch.autograd.grad(output, inputs, direction.to(output.dtype))
        results.append([output, *gradients])
    for found, expected in zip(*results):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03)
