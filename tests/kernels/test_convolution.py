from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F

from vitkit.kernels import convolution as kernels
from vitkit.kernels import use_kernels
from vitkit.kernels.convolution import RELU, ConvSettings, convolution, onednn
from vitkit.kernels.convolution.narrow import compute_narrow_maps_in_float32

LAYERS = {
    "1x1": dict(kernel=1),
    "3x3, stride 2": dict(kernel=3, stride=2, padding=1),
    "2x2": dict(kernel=2),
    "dilated": dict(kernel=3, padding=2, dilation=2),
    "groups": dict(kernel=3, padding=1, groups=2),
    "depthwise": dict(kernel=5, padding=2, groups=8),
}
REFERENCE = {
    None: lambda x: x,
    "silu": F.silu,
    RELU: F.relu,
    (-0.3, None): lambda x: x.clamp(min=-0.3),
    (None, 0.2): lambda x: x.clamp(max=0.2),
    (0.0, 6.0): F.relu6,
}


def layer(kernel=1, stride=1, padding=0, dilation=1, groups=1, activation=None):
    """Return x, weight, bias and settings."""
    torch.manual_seed(0)
    settings = ConvSettings((stride,) * 2, (padding,) * 2, (dilation,) * 2, groups, activation)
    return torch.randn(2, 8, 13, 9), torch.randn(16, 8 // groups, kernel, kernel), torch.randn(16), settings


@pytest.fixture
def fast_calls(monkeypatch):
    """Return the list of calls of the fast path."""
    if not onednn.is_available():
        pytest.skip("PyTorch without oneDNN's operators")
    calls = []
    monkeypatch.setattr(onednn, "convolution", lambda *args, run=onednn.convolution: calls.append(1) or run(*args))
    return calls


@pytest.mark.parametrize("activation", REFERENCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_equals_convolution_and_activation(name, activation, layout):
    x, weight, bias, settings = layer(**LAYERS[name], activation=activation)
    stride, padding, dilation, groups, _ = settings
    convolved = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    residual = torch.randn_like(convolved)
    x, before, cache = x.contiguous(memory_format=layout), x.clone(), {}
    with torch.inference_mode():
        for choice in ("fast", "plain"):
            with use_kernels(choice):
                output = convolution(x, weight, bias, settings, cache=cache)
                torch.testing.assert_close(output, REFERENCE[activation](convolved), atol=1e-4, rtol=1e-5)
                added = convolution(x, weight, bias, settings, residual=residual, cache=cache)
                torch.testing.assert_close(added, REFERENCE[activation](convolved + residual), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(x, before, atol=0, rtol=0)


def test_prepared_weights_serve_images_of_other_shapes(fast_calls):
    x, weight, bias, settings = layer(kernel=3, padding=1)
    cache = {}
    for shape in (x.shape, (1, 8, 40, 40), (3, 8, 1, 5)):
        x = torch.randn(shape)
        output = convolution(x, weight, bias, settings, cache=cache)
        torch.testing.assert_close(output, F.conv2d(x, weight, bias, padding=1), atol=1e-4, rtol=1e-5)
    assert len(fast_calls) == 3


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_residual_is_added_to_maps_of_one_pixel(batch_size):
    _, weight, bias, settings = layer(kernel=3, padding=1, activation=RELU)
    x, residual = torch.randn(batch_size, 8, 1, 1), torch.randn(batch_size, 16, 1, 1)
    output = convolution(x, weight, bias, settings, residual=residual, cache={})
    expected = F.relu(F.conv2d(x, weight, bias, padding=1) + residual)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-5)


def test_no_image_gives_no_output(fast_calls):
    x, weight, bias, settings = layer()
    assert convolution(x[:0], weight, bias, settings, cache={}).shape == (0, 16, 13, 9)


def test_gradient_reaches_a_bias_or_a_residual_alone(fast_calls):
    x, weight, bias, settings = layer(activation=RELU)
    convolution(x, weight, bias.add_(50).requires_grad_(), settings, cache={}).sum().backward()
    assert (bias.grad == 2 * 13 * 9).all() and not fast_calls
    bias = bias.detach()
    residual = torch.full((2, 16, 13, 9), 50.0, requires_grad=True)
    convolution(x, weight, bias, settings, residual=residual, cache={}).sum().backward()
    assert (residual.grad == 1).all() and not fast_calls


def test_gradients_other_types_autocast_and_compilers_run_the_definition(fast_calls, monkeypatch):
    x, weight, bias, settings = layer(kernel=3, padding=1, activation="silu")
    expected = F.silu(F.conv2d(x, weight, bias, padding=1))
    differentiable = x.clone().requires_grad_()
    output = convolution(differentiable, weight, bias, settings, residual=None, cache={})
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert differentiable.grad.abs().sum() > 0
    double = convolution(x.double(), weight.double(), bias.double(), settings, cache={})
    torch.testing.assert_close(double.float(), expected, atol=1e-4, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(x, weight, bias, settings, cache={}).dtype == torch.bfloat16
    program = torch.export.export(Convolution(weight, bias, settings), (x,), strict=False)
    assert not [node for node in program.graph.nodes if "mkldnn" in str(node.target)]
    monkeypatch.setattr(kernels, "_is_available", lambda: False)
    torch.testing.assert_close(convolution(x, weight, bias, settings, cache={}), expected)
    assert not fast_calls


@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.Conv3d])
def test_maps_narrower_than_the_stride_have_right_gradients_in_bfloat16(kind):
    torch.manual_seed(0)
    plain, frames = kind(16, 16, 3, stride=2, padding=1), [3] * (kind is torch.nn.Conv3d)
    model = torch.nn.Sequential(deepcopy(plain))
    compute_narrow_maps_in_float32(model)
    model = deepcopy(model)  # as its moving average is
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(4, 16, *frames, 2, 2)).dtype == torch.bfloat16
        for height in (1, 3):
            x = torch.randn(4, 16, *frames, height, 1)
            output = model(x)
            with torch.autocast("cpu", enabled=False):
                expected = plain(x)
            torch.testing.assert_close(output, expected)
            output.square().sum().backward()
            expected.square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain.weight.grad)
    assert model[0].state_dict().keys() == plain.state_dict().keys()


class Convolution(torch.nn.Module):
    def __init__(self, weight, bias, settings):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight, False), torch.nn.Parameter(bias, False)
        self.settings = settings

    def forward(self, x):
        return convolution(x, self.weight, self.bias, self.settings, cache={})
