import pytest
import torch
import torch.nn.functional as F

from vitkit.kernels import use_kernels
from vitkit.kernels.windows import gather, plain, window_partition

CASES = [((6, 9), 3, 0), ((6, 9), 3, 1), ((7, 5), 4, 0), ((7, 5), 4, 2), ((2, 3), 4, 2)]
"""(height, width) of the map, window size, shift."""
KERNELS = pytest.mark.parametrize("kernel", [gather, plain], ids=["gather", "plain"])


def by_hand(x, window, shift, value):
    """Pad (B, H, W, C) with `value`, roll it, and cut it window by window."""
    height, width = x.shape[1:3]
    x = F.pad(x - value, (0, 0, 0, -width % window, 0, -height % window)) + value
    x = x.roll((-shift, -shift), (1, 2))
    windows = [
        x[b, i : i + window, j : j + window].flatten(0, 1)
        for b in range(len(x))
        for i in range(0, x.shape[1], window)
        for j in range(0, x.shape[2], window)
    ]
    return torch.stack(windows)


@KERNELS
@pytest.mark.parametrize("size, window, shift", CASES)
def test_partition_pads_rolls_and_slices_and_reverse_undoes_it(kernel, size, window, shift):
    x = torch.randn(2, *size, 3)
    value = torch.randn(3)
    windows = kernel.window_partition(x, window, shift, value)
    torch.testing.assert_close(windows, by_hand(x, window, shift, value))
    expected = by_hand(x, window, shift, torch.zeros(3))
    torch.testing.assert_close(kernel.window_partition(x, window, shift), expected)
    assert torch.equal(kernel.window_reverse(windows, window, size, shift), x)


@pytest.mark.parametrize("size, window, shift", CASES)
def test_gradients_equal_those_of_the_plain_form(size, window, shift):
    x = torch.randn(2, *size, 2, dtype=torch.double, requires_grad=True)
    value = torch.randn(2, dtype=torch.double, requires_grad=True)
    gradients = []
    for kernel in (gather, plain):
        windows = kernel.window_partition(x, window, shift, value)
        upstream = torch.linspace(-1, 1, windows.numel()).view_as(windows).to(windows)
        # Without padding, the padding value has no gradient in the plain form.
        partitioned = torch.autograd.grad(windows, (x, value), upstream, allow_unused=True)
        windows = windows.detach().requires_grad_()
        output = kernel.window_reverse(windows, window, size, shift)
        upstream = torch.linspace(-1, 1, output.numel()).view_as(output).to(output)
        reversed_ = torch.autograd.grad(output, windows, upstream)
        gradients.append([torch.zeros(2).double() if g is None else g for g in (*partitioned, *reversed_)])
    for fast, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, expected)


def test_plain_form_can_be_requested(monkeypatch):
    monkeypatch.setattr(gather, "window_partition", None)
    with use_kernels("plain"):
        assert window_partition(torch.zeros(1, 4, 4, 1), 2).shape == (4, 4, 1)
