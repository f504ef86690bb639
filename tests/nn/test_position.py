import math

import pytest
import torch

from vitkit.nn.position import sine_positions_1d, sine_positions_2d
from vitkit.nn.vit_positions import pad_rotations, resize_positions_2d, rotary_positions_2d, rotate


def test_1d_encoding_equals_the_formula_of_the_paper():
    code = sine_positions_1d(10, 8)
    for position, channel in ((0, 0), (3, 0), (3, 1), (9, 4), (9, 7)):
        angle = position / 10000 ** (2 * (channel // 2) / 8)
        expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
        assert abs(code[position, channel] - expected) < 1e-6


def test_2d_encoding_has_rows_first_and_ends_at_two_pi():
    code = sine_positions_2d((3, 4), 8)
    assert code.shape == (1, 3, 4, 8)
    row, column = 2 * math.pi * 2 / (3 + 1e-6), 2 * math.pi * 1 / (4 + 1e-6)
    expected = [f(a / t) for a in (row, column) for t in (1, 100) for f in (math.sin, math.cos)]
    torch.testing.assert_close(code[0, 1, 0], torch.tensor(expected))


def test_2d_encoding_counts_only_unpadded_locations():
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[0, :3, :4] = False
    mask[1] = False
    code = sine_positions_2d((5, 6), 16, padding_mask=mask)
    torch.testing.assert_close(code[:1, :3, :4], sine_positions_2d((3, 4), 16))
    torch.testing.assert_close(code[1:], sine_positions_2d((5, 6), 16))
    assert torch.isfinite(code).all()


def test_offset_is_added_to_locations_before_normalization():
    code = sine_positions_2d((3, 3), 4, offset=-0.5)
    assert abs(code[0, 0, 0, 0] - math.sin(2 * math.pi * 0.5 / 3)) < 1e-5


def test_rotations_turn_pairs_of_channels_by_the_location_of_their_center():
    rotations = rotary_positions_2d((2, 4), 8)
    x = torch.randn(8, 8)
    turned = rotate(x, rotations)
    pairs = torch.complex(x[:, :4], x[:, 4:])
    for index in range(8):
        y, x_ = ((index // 4 + 0.5) / 2 * 2 - 1, (index % 4 + 0.5) / 4 * 2 - 1)
        # Two frequencies, 1 and 1 / sqrt(100), of the row, then of the column.
        angles = 2 * math.pi * torch.tensor([y, y / 10, x_, x_ / 10])
        expected = pairs[index] * torch.polar(torch.ones(4), angles)
        torch.testing.assert_close(torch.complex(turned[index, :4], turned[index, 4:]), expected)


def test_prefix_tokens_are_not_rotated():
    rotations = pad_rotations(rotary_positions_2d((1, 2), 4), 3)
    x = torch.randn(2, 5, 4)
    turned = rotate(x, rotations)
    assert torch.equal(turned[:, :3], x[:, :3]) and not torch.allclose(turned[:, 3:], x[:, 3:])
    assert pad_rotations(None, 3) is None


@pytest.mark.parametrize(("grid", "size"), [((14, 14), (6, 6)), ((14, 10), (30, 41)), ((4, 4), (3, 1))])
def test_positions_with_an_offset_are_torchs_for_that_factor(grid, size):
    table = torch.randn(1, grid[0] * grid[1], 8, generator=torch.Generator().manual_seed(0))
    factors = [(new + 0.1) / old for new, old in zip(size, grid)]
    maps = table.mT.unflatten(2, grid)
    expected = torch.nn.functional.interpolate(maps, scale_factor=factors, mode="bicubic").flatten(2).mT
    torch.testing.assert_close(resize_positions_2d(table, grid, size, offset=0.1), expected, atol=1e-5, rtol=1e-5)
    assert resize_positions_2d(table, grid, grid, offset=0.1) is table
