import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.visualization.attention import draw_word_attention
from vitkit.visualization.captions import caption_sheet


def test_sheet_of_captions(tmp_path):
    rows = [
        (np.full((40, 60, 3), 40 * i, np.uint8), {"text": "a dog " * 12 if i else ""}, {"references": ["A cat ."]})
        for i in range(5)
    ]
    caption_sheet(rows, (), tmp_path / "sheets/captions.png")
    with Image.open(tmp_path / "sheets/captions.png") as sheet:
        assert sheet.format == "PNG" and sheet.width > 1000


def test_words_with_their_attention(tmp_path):
    weights = torch.rand(3, 4, 6)
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    draw_word_attention(image, ["a", "red", "ring"], weights, tmp_path / "new/words.png")
    with Image.open(tmp_path / "new/words.png") as picture:
        assert picture.format == "PNG"
    with pytest.raises(ValueError, match="longer"):
        draw_word_attention(image, ["a", "red"], weights, tmp_path / "words.png")
