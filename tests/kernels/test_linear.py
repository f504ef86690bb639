import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from vitkit.kernels import linear as kernels
from vitkit.kernels import use_kernels
from vitkit.kernels.linear import gelu_linear, linear
from vitkit.nn.layers import FeedForward, FusedLinear, Linear, TokenMLP


@pytest.fixture
def by_onednn(monkeypatch):
    """Use the product that is chosen on AMD's processors, on any processor."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("PyTorch without oneDNN")
    monkeypatch.setattr(kernels, "onednn_is_fast", lambda: True)
    calls = []
    product = kernels.onednn_product
    monkeypatch.setattr(kernels, "onednn_product", lambda *args: calls.append(len(args)) or product(*args))
    return calls


@pytest.mark.parametrize("shape", [(300, 64), (3, 100, 64), (2, 3, 50, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_outputs_and_gradients_equal_pytorch(by_onednn, shape, with_bias, layout):
    torch.manual_seed(0)
    x = torch.randn(shape)
    if layout == "transposed":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        x = x[:1].expand(shape)
    x, weight = x.detach().requires_grad_(), torch.randn(96, 64, requires_grad=True)
    bias = torch.randn(96, requires_grad=True) if with_bias else None
    inputs = [x, weight, bias][: 2 + with_bias]
    upstream = torch.randn(*shape[:-1], 96)

    output = linear(x, weight, bias)
    assert by_onednn
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad(output, inputs, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, upstream), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_frozen_tensors_get_no_gradient(by_onednn, frozen):
    parts = {"input": torch.randn(300, 64), "weight": torch.randn(96, 64), "bias": torch.randn(96)}
    for name, part in parts.items():
        part.requires_grad_(name != frozen)
    linear(*parts.values()).sum().backward()
    assert {name for name, part in parts.items() if part.grad is None} == {frozen}


def test_slice_of_a_weight_gets_its_gradient_in_place(by_onednn):
    weight = torch.randn(192, 64, requires_grad=True)
    x = torch.randn(300, 64)
    linear(x, weight[96:]).sum().backward()
    assert not weight.grad[:96].any()
    torch.testing.assert_close(weight.grad[96:], x.sum(0).expand(96, 64), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(4, 8), (0, 4096), (4096,), (2, 4096)])
def test_small_products_and_other_dtypes_are_left_to_pytorch(by_onednn, shape):
    x = torch.randn(shape)
    weight = torch.randn(512, shape[-1])
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    x, weight = torch.randn(300, 64).double(), torch.randn(96, 64).double()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    assert not by_onednn


def test_autocast_and_tracing_are_left_to_pytorch(by_onednn):
    layer, x = Linear(64, 96), torch.randn(300, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    graph = torch.jit.trace(layer, x, check_trace=False).inlined_graph
    assert "aten::linear" in str(graph)
    assert not by_onednn


def test_plain_form_is_that_of_pytorch(by_onednn):
    x, weight = torch.randn(300, 64), torch.randn(96, 64)
    with use_kernels("plain"):
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert not by_onednn


def test_operands_of_backward_products_have_contiguous_rows(by_onednn, monkeypatch):
    """A chunk's rows have gaps, with which oneDNN's transposed product would take a hundred times as long."""
    gaps = []
    product = kernels.onednn_product
    monkeypatch.setattr(
        kernels,
        "onednn_product",
        lambda a, b, *bias: gaps.append([max(t.stride()) > min(t.shape) for t in (a, b)]) or product(a, b, *bias),
    )
    x, _ = torch.randn(300, 128, requires_grad=True).chunk(2, dim=-1)
    weight = torch.randn(64, 64, requires_grad=True)
    upstream, _ = torch.randn(300, 128).chunk(2, dim=-1)
    linear(x, weight).backward(upstream)
    assert len(gaps) == 3 and not any(any(pair) for pair in gaps)


@pytest.mark.parametrize("shape", [(4, 16), (2, 300, 512)])  # the second is large enough for oneDNN
@pytest.mark.parametrize("with_bias", [False, True])
def test_gelu_and_its_gradients_stay_equal_though_activations_are_not_stored(shape, with_bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape), torch.randn(96, shape[-1]), torch.randn(96)][: 2 + with_bias]
    upstream, results, stored = torch.randn(*shape[:-1], 96), [], []
    for function in (gelu_linear, lambda x, *weights: linear(F.gelu(x), *weights)):
        leaves, saved = [tensor.clone().requires_grad_() for tensor in inputs], {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.update({t.data_ptr(): t.numel()}) or t, lambda t: t
        ):
            output = function(*leaves)
        stored.append(sum(saved.values()))
        results.append([output, *torch.autograd.grad(output, leaves, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert stored[1] - stored[0] == inputs[0].numel()


def test_gradients_are_those_of_the_forward_pass_if_computed_in_autocast():
    torch.manual_seed(0)
    leaves = [torch.randn(size, requires_grad=True) for size in ((20, 16), (12, 16), (12,))]
    loss, gradients = gelu_linear(*leaves).square().sum(), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(loss, leaves, retain_graph=True))
    torch.testing.assert_close(*gradients)


def test_weight_in_onednns_order_gives_the_same_outputs(by_onednn):
    torch.manual_seed(0)
    layer, other = Linear(64, 96), Linear(64, 96)
    fused = layer.fused()
    assert isinstance(fused, FusedLinear) and fused.weight is layer.weight
    for shape in ((300, 64), (2, 200, 64)):
        x = torch.randn(shape)
        with torch.inference_mode():
            assert torch.equal(fused(x), layer(x))
    assert "weight" in fused._cache
    assert torch.equal(copy.deepcopy(fused)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(fused))(x), layer(x))
    assert fused(x).requires_grad  # in explanations
    with torch.no_grad():
        fused.weight.copy_(other.weight)
        fused.bias.copy_(other.bias)
    with torch.inference_mode():
        assert torch.equal(fused(x), other(x))
    with torch.no_grad():
        layer.weight.mul_(2)  # which is the fused one's, too
        assert torch.equal(fused(x), layer(x))
        ones = {"weight": torch.ones(96, 64)}
        assert torch.equal(*(torch.func.functional_call(module, ones, x) for module in (fused, layer)))
        assert torch.equal(fused(x), layer(x))
        assert fused.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("channels", [(64, 96), (96, 64)])
def test_gradient_of_a_weight_transposes_the_narrower_operand(by_onednn, monkeypatch, channels):
    """oneDNN copies its first operand if it is transposed."""
    transposed = []
    product = kernels.onednn_product
    monkeypatch.setattr(
        kernels,
        "onednn_product",
        lambda a, b, *bias: transposed.append(None if a.is_contiguous() else len(a)) or product(a, b, *bias),
    )
    x, weight = torch.randn(300, channels[0]), torch.randn(channels[::-1], requires_grad=True)
    linear(x, weight).sum().backward()
    assert transposed == [None, 64] and weight.grad.is_contiguous()
    torch.testing.assert_close(weight.grad, x.sum(0).expand_as(weight), atol=1e-3, rtol=1e-4)


def test_gelu_in_bfloat16_equals_autocasts():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = gelu_linear(x, weight), F.linear(F.gelu(x.bfloat16()), weight)
    assert torch.equal(*outputs) and outputs[0].dtype == torch.bfloat16
    gradients = [torch.autograd.grad(output.float().sum(), (x, weight)) for output in outputs]
    assert all(gradient.dtype == torch.float32 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


def test_a_replaced_or_watched_layer_of_an_mlp_is_called():
    mlp, x, calls = TokenMLP(4, 8), torch.randn(2, 4), []
    expected = mlp(x)
    handle = mlp.fc2.register_forward_hook(lambda *_: calls.append("hook"))
    assert torch.equal(mlp(x), expected) and calls == ["hook"]
    handle.remove()
    mlp.fc2 = torch.nn.Linear(8, 4)
    assert torch.equal(mlp(x), mlp.fc2(F.gelu(mlp.fc1(x))))


def test_a_replaced_or_watched_layer_of_a_feed_forward_network_is_called():
    ffn, x, calls = FeedForward(4, 8), torch.randn(2, 4), []
    expected = ffn(x)
    for layer in (ffn.linear1, ffn.linear2):
        handle = layer.register_forward_hook(lambda *_: calls.append("hook"))
        assert torch.equal(ffn(x), expected) and calls == ["hook"]
        handle.remove()
        handle = layer.register_full_backward_hook(lambda *_: calls.append("gradient"))
        ffn(x.clone().requires_grad_()).sum().backward()
        assert calls == ["hook", "gradient"]
        handle.remove()
        calls.clear()
    ffn.linear2 = torch.nn.Linear(8, 4)
    assert torch.equal(ffn(x), ffn.linear2(F.relu(ffn.linear1(x))))
