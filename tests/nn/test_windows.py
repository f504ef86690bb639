import torch

from vitkit.nn.windows import relative_position_index, shift_bias


def test_relative_position_index_of_a_window_of_size_two():
    # Offsets in rows and columns from -1 to 1, numbered row by row: none is 4.
    expected = [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert relative_position_index(2).tolist() == expected


def test_shift_bias_masks_locations_that_were_not_adjacent():
    masked = shift_bias((4, 4), 2, 1)[:, 0] < 0
    assert masked.shape == (4, 4, 4)
    assert not masked[0].any()  # inside the map
    right = torch.tensor([0, 1, 0, 1])  # its second column comes from the left border
    assert torch.equal(masked[1], right[:, None] != right)
    assert torch.equal(masked[3], ~torch.eye(4, dtype=torch.bool))
