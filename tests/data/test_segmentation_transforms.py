"""Large-scale jitter and crops of semantic maps: sizes, padding, and masks that follow the image."""

import cv2
import numpy as np
import pytest

from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.pipelines import LargeScaleJitter, SemanticTrainTransforms
from vitkit.errors import ConfigError


def regions(height=120, width=160):
    """An image whose red channel tells the region of a pixel (1 to 4, in four vertical bands), with its map."""
    numbers = np.repeat(np.arange(1, 5, dtype=np.uint8), width // 4)[None].repeat(height, axis=0)
    image = np.stack([numbers * 50, numbers * 0 + 90, numbers * 0 + 30], axis=2).astype(np.uint8)
    return AnnotatedImage(image, segment_map=numbers)


def assert_map_follows(image, numbers):
    """Check that, away from edges, the map agrees with the image's red channel; padding is gray and in no region."""
    padding = (image == 128).all(axis=2)
    assert not numbers[padding].any()
    inner = cv2.erode(numbers, np.ones((5, 5))) == cv2.dilate(numbers, np.ones((5, 5)))
    seen = inner & (numbers > 0)
    assert np.array_equal(image[seen][:, 0], numbers[seen] * 50)


@pytest.mark.parametrize("seed", range(8))
def test_jitter_gives_a_fixed_size_and_transforms_maps_with_the_image(seed):
    result = LargeScaleJitter(size=128)(regions(), seed=seed)
    assert result.image.shape == (128, 128, 3)
    assert result.segment_map.shape == (128, 128) and result.segment_map.dtype == np.uint8
    assert_map_follows(result.image, result.segment_map)


def test_jitter_scales_relative_to_the_fitting_size():
    box, label = np.array([[0, 0, 200, 100]], np.float32), np.zeros(1, np.int64)
    sample = regions(100, 200)._replace(boxes_xyxy=box, labels=label)
    small = LargeScaleJitter(size=128, scale_range=(0.5, 0.5), flip_probability=0)(sample, seed=0)
    # 200 wide becomes 128 by a fit, and 64 by the factor; the rest is gray.
    assert (small.segment_map > 0).sum() == 64 * 32 and (small.segment_map[:32, :64] > 0).all()
    assert (small.image[32:] == 128).all() and (small.image[:, 64:] == 128).all()
    assert small.boxes_xyxy.tolist() == [[0, 0, 64, 32]]
    large = LargeScaleJitter(size=128, scale_range=(4.0, 4.0))(sample, seed=0)
    assert (large.segment_map > 0).all()


def test_jittered_boxes_follow_their_masks():
    image = np.zeros((90, 120, 3), np.uint8)
    boxes = np.array([[10, 20, 50, 70], [60, 5, 118, 40]], np.float32)
    masks = np.zeros((2, 90, 120), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.astype(int)):
        mask[y0:y1, x0:x1] = 1
    for seed in range(12):
        result = LargeScaleJitter(size=96, scale_range=(0.6, 2.0))(
            AnnotatedImage(image, boxes, np.arange(2), masks), seed=seed
        )
        for box, mask in zip(result.boxes_xyxy, result.masks):
            ys, xs = np.nonzero(mask)
            if len(xs):
                np.testing.assert_allclose(box, [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=1.6)


@pytest.mark.parametrize("seed", range(6))
def test_semantic_crops_have_a_fixed_size_and_follow_the_image(seed):
    transforms = SemanticTrainTransforms(crop_size=(64, 96), short_sides=[40, 80, 160], color_probability=0)
    result = transforms(regions(), seed=seed)
    assert result.image.shape == (64, 96, 3)
    assert_map_follows(result.image, result.segment_map)


def test_default_scales_are_the_originals():
    crop = SemanticTrainTransforms(crop_size=(512, 1024))._compose.transforms[0]
    assert crop.short_sides[0] == 512 and crop.short_sides[-1] == 2048 and len(crop.short_sides) == 16
    assert crop.max_size == 4096


def test_crops_with_too_much_of_one_class_are_drawn_again():
    regions_ = regions(64, 256)
    image, segment_map = regions_.image, regions_.segment_map
    segment_map = np.where(segment_map == 1, 1, 2).astype(np.uint8)  # a quarter of class 1 at the left
    segment_map[:8] = 0  # ignored pixels do not count
    sample = AnnotatedImage(image, segment_map=segment_map)

    def greatest_parts(max_class_area):
        transforms = SemanticTrainTransforms(
            crop_size=(64, 64), short_sides=[64], max_class_area=max_class_area, color_probability=0
        )
        parts = []
        for seed in range(60):
            counts = np.bincount(transforms(sample, seed=seed).segment_map.ravel(), minlength=3)[1:]
            parts.append(counts.max() / counts.sum())
        return np.array(parts)

    free, bounded = greatest_parts(1.0), greatest_parts(0.75)
    assert (free >= 0.75).mean() > 0.7
    assert (bounded >= 0.75).mean() < 0.3  # ten tries do not always find one


def test_images_without_objects_are_cropped_too():
    image = np.zeros((50, 60, 3), np.uint8)
    for transforms in (LargeScaleJitter(size=32), SemanticTrainTransforms(crop_size=(32, 32))):
        no_boxes, no_masks = np.zeros((0, 4), np.float32), np.zeros((0, 50, 60), np.uint8)
        result = transforms(AnnotatedImage(image, no_boxes, np.zeros(0, np.int64), no_masks), seed=0)
        assert result.image.shape == (32, 32, 3) and result.masks.shape == (0, 32, 32)


def test_bad_ranges_are_errors():
    with pytest.raises(ConfigError, match=r"scale_range is \(0, 2.0\); expected \(minimum, maximum\) above 0"):
        LargeScaleJitter(scale_range=(0, 2.0))
    with pytest.raises(ConfigError, match="size is 0; expected at least 1 pixel"):
        LargeScaleJitter(size=0)
    with pytest.raises(ConfigError, match="max_class_area is 1.5; expected above 0 and at most 1"):
        SemanticTrainTransforms(max_class_area=1.5)


def test_jitter_changes_colors_of_the_image_but_not_of_the_padding():
    options = dict(size=128, scale_range=(0.5, 0.5), flip_probability=0, pad_value=0)
    plain = LargeScaleJitter(**options)(regions(), seed=3)
    changed = LargeScaleJitter(**options, color_probability=1.0)(regions(), seed=3)
    padding = (plain.image == 0).all(-1)
    assert 0.5 < padding.mean() < 1 and not changed.image[padding].any()
    assert not np.array_equal(plain.image, changed.image)
