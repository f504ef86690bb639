import pytest
import torch
from PIL import Image

from vitkit.apps.explanations.text_drawing import draw_alignment


def test_an_alignment_matrix_is_drawn(tmp_path):
    attention = torch.eye(3, 4)
    path = tmp_path / "new" / "a.png"
    draw_alignment(attention, ["▁a", "b", "c", "</s>"], ["▁x", "ß", "$z$"], path)
    figure = Image.open(path).convert("L")
    assert figure.width > 300 and figure.height > 200
    # There are both white and black cells.
    assert figure.getextrema() == (0, 255)


def test_drawings_of_long_sentences_have_a_maximum_size(tmp_path):
    draw_alignment(torch.rand(150, 120), ["w"] * 120, ["v"] * 150, tmp_path / "a.png")
    assert max(Image.open(tmp_path / "a.png").size) < 4000


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (0, 4)])
def test_other_shapes_are_refused(shape, tmp_path):
    with pytest.raises(ValueError, match=r"attention: got .* for 3 written and 4 read tokens"):
        draw_alignment(torch.zeros(shape), ["a"] * 4, ["b"] * 3, tmp_path / "a.png")
