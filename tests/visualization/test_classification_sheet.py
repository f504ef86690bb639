import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.visualization.classification import classification_sheet


def test_every_image_is_shown_with_its_classes(tmp_path):
    rows = [
        (np.full((20, 30, 3), 40 * i, np.uint8), {"class_scores": torch.tensor([0.3, 0.7])}, {"label": i % 2})
        for i in range(5)
    ]
    classification_sheet(rows, ["cat", "dog"], tmp_path / "new" / "sheet.png")
    pixels = np.asarray(Image.open(tmp_path / "new" / "sheet.png").convert("RGB")).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in np.unique(pixels, axis=0).tolist()}
    assert {(40 * i,) * 3 for i in range(5)} <= colours
    assert {(0, 128, 0), (178, 34, 34)} <= colours  # right and wrong titles


def test_no_images_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="rows: got none"):
        classification_sheet([], ["cat"], tmp_path / "sheet.png")
