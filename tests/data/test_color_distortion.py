"""Colors change as sampled, and each change is sampled about as often as the recipe says."""

import numpy as np

from vitkit.data.transforms.color_distortion import ColorDistortion


def distort(image, **drawn):
    neutral = dict(shift=0, contrast=1, contrast_first=True, saturation=1, rotation=0)
    return ColorDistortion().apply(image, **{**neutral, **drawn})


def test_each_distortion_changes_its_own_property():
    image = np.array([[[200, 100, 50], [10, 20, 250]]], np.uint8)
    assert np.array_equal(distort(image), image)
    assert distort(image, shift=20).tolist() == [[[220, 120, 70], [30, 40, 255]]]
    assert distort(image, contrast=0.5).tolist() == [[[100, 50, 25], [5, 10, 125]]]
    assert distort(image, contrast=0.5, contrast_first=False).tolist() == [[[100, 50, 25], [5, 10, 125]]]
    gray = distort(image, saturation=0)
    assert np.array_equal(gray, image.max(axis=2, keepdims=True).repeat(3, axis=2))  # V of HSV is the largest color
    turned = distort(np.array([[[240, 0, 0]]], np.uint8), rotation=120)
    assert turned.tolist() == [[[0, 240, 0]]]


def test_each_distortion_applies_to_about_half_of_the_images():
    distortion = ColorDistortion()
    distortion.set_random_seed(0)
    drawn = [distortion.get_params() for _ in range(400)]
    for name, neutral in (("shift", 0), ("contrast", 1), ("saturation", 1), ("rotation", 0)):
        assert 0.4 < np.mean([d[name] != neutral for d in drawn]) < 0.6
    assert max(abs(d["shift"]) for d in drawn) <= 32 and min(d["contrast"] for d in drawn) >= 0.5
