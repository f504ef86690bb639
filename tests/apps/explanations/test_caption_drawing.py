import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.apps.explanations.drawing import draw_word_attention


def test_words_are_drawn_with_their_attention(tmp_path):
    weights = torch.rand(3, 4, 6)
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    draw_word_attention(image, ["a", "red", "ring"], weights, tmp_path / "new/words.png")
    with Image.open(tmp_path / "new/words.png") as figure:
        assert figure.format == "PNG"
    with pytest.raises(ValueError, match="longer"):
        draw_word_attention(image, ["a", "red"], weights, tmp_path / "words.png")
