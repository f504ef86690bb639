import math

import torch

from vitkit.nn.position import sine_positions_1d, sine_positions_2d


def test_1d_code_is_the_papers_formula():
    code = sine_positions_1d(10, 8)
    for position, channel in ((0, 0), (3, 0), (3, 1), (9, 4), (9, 7)):
        angle = position / 10000 ** (2 * (channel // 2) / 8)
        expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
        assert abs(code[position, channel] - expected) < 1e-6


def test_2d_code_has_the_row_first_and_ends_at_two_pi():
    code = sine_positions_2d((3, 4), 8)
    assert code.shape == (1, 3, 4, 8)
    row, column = 2 * math.pi * 2 / (3 + 1e-6), 2 * math.pi * 1 / (4 + 1e-6)
    expected = [f(a / t) for a in (row, column) for t in (1, 100) for f in (math.sin, math.cos)]
    torch.testing.assert_close(code[0, 1, 0], torch.tensor(expected))


def test_2d_code_counts_only_locations_that_are_not_padded():
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[0, :3, :4] = False
    mask[1] = False
    code = sine_positions_2d((5, 6), 16, padding_mask=mask)
    torch.testing.assert_close(code[:1, :3, :4], sine_positions_2d((3, 4), 16))
    torch.testing.assert_close(code[1:], sine_positions_2d((5, 6), 16))
    assert torch.isfinite(code).all()


def test_offset_moves_locations_before_they_are_normalised():
    code = sine_positions_2d((3, 3), 4, offset=-0.5)
    assert abs(code[0, 0, 0, 0] - math.sin(2 * math.pi * 0.5 / 3)) < 1e-5
