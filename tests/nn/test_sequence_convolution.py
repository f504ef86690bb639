import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.nn.sequence_convolution import SequenceConvolution


def test_each_output_is_a_weighted_sum_over_neighbouring_tokens():
    torch.manual_seed(0)
    layer = SequenceConvolution(4, 3).eval()
    x = torch.randn(2, 5, 4)
    weight = layer.conv.weight  # (out, in, 3)
    padded = torch.cat([torch.zeros(2, 1, 4), x, torch.zeros(2, 1, 4)], dim=1)
    mixed = torch.stack([sum(padded[:, t + j] @ weight[:, :, j].T for j in range(3)) for t in range(5)], dim=1)
    expected = layer.norm(x + (mixed + layer.conv.bias).relu())
    torch.testing.assert_close(layer(x), expected)


def test_causal_layer_ignores_later_tokens():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 4)
    changed = x.clone()
    changed[:, 5:] += 1
    for causal in (True, False):
        layer = SequenceConvolution(4, 3, causal=causal).eval()
        same = torch.isclose(layer(x), layer(changed)).all(-1)[0]
        assert same[:4].all() and bool(same[4]) is causal and not same[5:].any()


def test_padding_is_ignored():
    torch.manual_seed(0)
    layer = SequenceConvolution(4, 5).eval()
    x = torch.randn(1, 6, 4)
    padding = torch.tensor([[False, False, False, False, True, True]])
    torch.testing.assert_close(layer(x, padding)[:, :4], layer(x[:, :4]))


@pytest.mark.parametrize(("size", "causal"), [(4, False), (0, True)])
def test_even_kernel_size_is_refused(size, causal):
    with pytest.raises(ConfigError, match=f"kernel_size: got {size}; expected an odd number"):
        SequenceConvolution(4, size, causal=causal)
