"""Masks are encoded and decoded by what they contain, not by the size of their image."""

import time

import numpy as np
from PIL import Image

from vitkit.data.formats import read_annotations
from vitkit.io.segmentations import decode_segmentation, mask_annotation, pixels_annotation, region_annotation


def test_small_masks_of_a_large_image_are_read_in_little_time(tmp_path):
    Image.new("RGB", (4000, 3000)).save(tmp_path / "a.png")
    mask = '<mask label="cell" rle="1,2,1" left="10" top="3" width="2" height="2"/>'
    image = '<image name="a.png" width="4000" height="3000">'
    (tmp_path / "a.xml").write_text(f"<annotations>{image}{mask * 3000}</image></annotations>")
    began = time.process_time()
    data = read_annotations(tmp_path / "a.xml")
    assert len(data.annotations) == 3000 and time.process_time() - began < 10
    mask = decode_segmentation(data.annotations[-1]["segmentation"], 3000, 4000)
    assert mask[3:5, 10:12].tolist() == [[0, 1], [1, 0]] and mask.sum() == 2


def test_masks_are_encoded_from_their_region_or_pixels_as_from_the_whole_mask():
    rng = np.random.default_rng(0)
    for _ in range(300):
        height, width, h, w, left, top = rng.integers((1, 1, 0, 0, -5, -5), (9, 9, 9, 9, 9, 9)).tolist()
        region = rng.random((h, w)) < rng.choice([0.1, 0.5, 1])
        canvas = np.zeros((32, 32), bool)
        canvas[8 + top : 8 + top + h, 8 + left : 8 + left + w] = region
        mask = canvas[8 : 8 + height, 8 : 8 + width]
        expected = mask_annotation(mask)
        assert region_annotation(region, left, top, height, width) == expected
        assert pixels_annotation(np.flatnonzero(mask.T), height, width) == expected
