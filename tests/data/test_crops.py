"""Sizes as published, and the fold of crop and resize."""

import random

import numpy as np
import pytest

from vitkit.data.transforms.crops import Crop, MultiScaleCrop, compute_resized_size

BOXES = np.array([(20, 30, 220, 180), (300, 40, 630, 200), (100, 250, 400, 470)]) / np.array([640, 480] * 2)
"""xyxy in 0..1, for images of any size."""


def original_resize(height, width, size, max_size=None):
    """Compute a size as in the published recipe, for both orientations."""
    if max_size and max(height, width) / min(height, width) * size > max_size:
        size = round(max_size * min(height, width) / max(height, width))
    if min(height, width) == size:
        return height, width
    return (int(size * height / width), size) if width < height else (size, int(size * width / height))


@pytest.mark.parametrize("shape", [(480, 640), (640, 480), (427, 640), (500, 333), (300, 300), (100, 900)])
def test_folded_transform_equals_resize_crop_resize_within_a_pixel(shape):
    """The same drawn numbers, step by step as published: sizes are equal, boxes within a pixel of the source."""
    fold = MultiScaleCrop(crop_probability=1.0)
    height, width = shape
    for seed in range(20):
        fold.set_random_seed(seed)
        drawn = fold.get_params_dependent_on_data({"shape": (*shape, 3)}, {})
        folded = fold.apply_to_bboxes(BOXES, **drawn, shape=(*shape, 3)) * np.array([*drawn["crop"].size[::-1]] * 2)

        numbers = random.Random(seed)
        numbers.random()
        first = original_resize(height, width, numbers.choice((400, 500, 600)))
        crop_width = numbers.randint(min(384, first[1]), min(first[1], 600))
        crop_height = numbers.randint(min(384, first[0]), min(first[0], 600))
        top, left = numbers.randint(0, first[0] - crop_height), numbers.randint(0, first[1] - crop_width)
        last = original_resize(crop_height, crop_width, numbers.choice(range(480, 801, 32)), 1333)
        steps = BOXES * np.array([first[1], first[0]] * 2) - np.array([left, top] * 2)
        steps = steps * np.array([last[1] / crop_width, last[0] / crop_height] * 2)

        assert drawn["crop"].size == last
        x0, y0, x1, y1 = drawn["crop"].box
        source_pixel = np.array([last[1] / (x1 - x0), last[0] / (y1 - y0)] * 2)
        inside = BOXES.clip(np.array([x0 / width, y0 / height] * 2), np.array([x1 / width, y1 / height] * 2)) == BOXES
        assert (np.abs(folded - steps) / source_pixel)[inside].max(initial=0) <= 1


def test_folded_transform_crops_the_pixels_of_its_boxes():
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    fold = MultiScaleCrop()
    cropped = fold.apply(image, crop=Crop((100, 50, 400, 350), (300, 300), (300, 300)))
    assert np.array_equal(cropped, image[50:350, 100:400])


@pytest.mark.parametrize(
    ("size", "expected"),
    [((480, 640), (800, 1066)), ((640, 480), (1066, 800)), ((300, 900), (444, 1332)), ((800, 900), (800, 900))],
)
def test_resized_size_is_computed_correctly(size, expected):
    assert compute_resized_size(*size, short_side=800, max_size=1333) == expected == original_resize(*size, 800, 1333)


@pytest.mark.parametrize(("size", "expected"), [((1, 20_000), (1, 1333)), ((9000, 3), (1333, 1))])
def test_very_long_images_keep_a_pixel_of_their_short_side(size, expected):
    assert compute_resized_size(*size, short_side=800, max_size=1333) == expected
