import pytest
import torch
import torch.nn.functional as F

from vitkit.nn.windows import WindowGrid, relative_places

GRIDS = [
    WindowGrid(6, 9, 3),
    WindowGrid(6, 9, 3, 1),
    WindowGrid(7, 5, 4),
    WindowGrid(7, 5, 4, 2),
    WindowGrid(2, 3, 4, 2),
]


def by_hand(x, grid, fill):
    """(B, H, W, C) padded with `fill`, rolled, and cut window by window."""
    down, right = grid.rows * grid.window - grid.height, grid.columns * grid.window - grid.width
    x = F.pad(x - fill, (0, 0, 0, right, 0, down)) + fill
    x = x.roll((-grid.shift, -grid.shift), (1, 2))
    windows = [
        x[b, i * grid.window :, j * grid.window :][: grid.window, : grid.window].flatten(0, 1)
        for b in range(len(x))
        for i in range(grid.rows)
        for j in range(grid.columns)
    ]
    return torch.stack(windows)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
def test_cutting_is_padding_rolling_and_slicing_and_joining_undoes_it(grid, numbered):
    x = torch.randn(2, grid.height, grid.width, 3)
    fill = torch.randn(3)
    expected, plain = by_hand(x, grid, fill), by_hand(x, grid, torch.zeros(3))
    if numbered:
        grid = WindowGrid(grid.height, grid.width, grid.window, grid.shift, device="cpu")
    torch.testing.assert_close(grid.cut(x, fill), expected)
    torch.testing.assert_close(grid.cut(x), plain)
    assert torch.equal(grid.join(grid.cut(x, fill)), x)


@pytest.mark.parametrize("grid", GRIDS)
def test_gradients_of_cutting_and_joining(grid):
    x = torch.randn(2, grid.height, grid.width, 2, dtype=torch.double, requires_grad=True)
    fill = torch.randn(2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(grid.cut, (x, fill))
    assert torch.autograd.gradcheck(grid.join, (grid.cut(x, fill).detach().requires_grad_(),))


def test_relative_places_of_a_window_of_two():
    # Offsets in rows and columns from -1 to 1, numbered row by row: none is 4.
    expected = [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert relative_places(2).tolist() == expected


def test_shift_bias_blocks_what_was_not_a_neighbour():
    blocked = WindowGrid(4, 4, 2, 1).shift_bias()[:, 0] < 0
    assert blocked.shape == (4, 4, 4)
    assert not blocked[0].any()  # inside the map
    right = torch.tensor([0, 1, 0, 1])  # its second column comes from the left border
    assert torch.equal(blocked[1], right[:, None] != right)
    assert torch.equal(blocked[3], ~torch.eye(4, dtype=torch.bool))
