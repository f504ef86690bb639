import torch
import torch.nn.functional as F
from torch import nn

from vitkit.nn.padding import extend_edges, group_norm, zero_padding


def test_masked_group_norm_equals_that_of_the_unpadded_part():
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 8, 6, 7)
    mask = torch.zeros(2, 6, 7, dtype=torch.bool)
    mask[0, 4:] = mask[0, :, 5:] = True
    got = group_norm(x, mask, norm)
    torch.testing.assert_close(got[0, :, :4, :5], norm(x[:1, :, :4, :5])[0])
    torch.testing.assert_close(got[1], norm(x[1:])[0])
    assert torch.isfinite(group_norm(x, torch.ones_like(mask), norm)).all()


def test_bilinear_resizing_with_extended_edges_equals_that_of_the_unpadded_image():
    x = torch.randn(2, 3, 8, 10)
    mask = torch.ones(2, 32, 40, dtype=torch.bool)
    mask[0, :20, :28] = mask[1, :32, :4] = False
    resized = F.interpolate(extend_edges(x, mask), scale_factor=2, mode="bilinear")
    for i, (height, width) in enumerate(((5, 7), (8, 1))):
        alone = F.interpolate(x[i : i + 1, :, :height, :width], scale_factor=2, mode="bilinear")[0]
        torch.testing.assert_close(resized[i, :, : 2 * height, : 2 * width], alone)
    assert extend_edges(x, torch.ones_like(mask)).isfinite().all()


def test_padding_is_zeroed_if_there_is_a_mask():
    x = torch.randn(1, 3, 4, 4)
    mask = torch.zeros(1, 8, 8, dtype=torch.bool)
    mask[:, 4:] = True
    zeroed = zero_padding(x, mask)
    assert torch.equal(zeroed[:, :, :2], x[:, :, :2])
    assert not zeroed[:, :, 2:].any()
    assert zero_padding(x, None) is x
    assert extend_edges(x, None) is x
