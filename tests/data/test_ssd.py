"""The augmentation of SSD against torchvision's, on the same random draws, and by hand."""

import random

import albumentations as A
import numpy as np
import pytest
import torch
from helpers.annotated_images import assert_consistent, blocks
from helpers.torchvision_images import scattered
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.pipelines import ComposedTransforms
from vitkit.data.transforms.ssd import PhotometricDistort, RandomIoUCrop, RandomZoomOut
from vitkit.errors import ConfigError


class TorchDraws(random.Random):
    """Draws what torchvision draws: numbers of torch's global generator, one by one."""

    def random(self):
        return float(torch.rand(1))

    def choice(self, options):
        return options[int(torch.randint(low=0, high=len(options), size=(1,)))]


def ours(transform, sample):
    """Apply an albumentation with torch's draws: the image, boxes, rows of the objects that are kept, and masks."""
    transform.set_random_state(np.random.default_rng(0), TorchDraws())
    height, width = sample.image.shape[:2]
    rows = np.arange(len(sample.boxes_xyxy))[:, None]
    boxes = np.concatenate([sample.boxes_xyxy / np.array([width, height] * 2), rows], axis=1)
    params = {"shape": sample.image.shape}
    params |= transform.get_params_dependent_on_data(params, {"bboxes": boxes})
    moved = transform.apply_to_bboxes(boxes, **params)
    image = transform.apply(sample.image, **params)
    kept = moved[:, 4].astype(int)
    masks = np.array([transform.apply_to_mask(mask, **params) for mask in sample.masks[kept]])
    return image, moved[:, :4] * np.array([image.shape[1], image.shape[0]] * 2), kept, masks


def assert_equal(result, theirs, *, sanitize=False):
    image, boxes, rows, masks = result
    if sanitize:
        left = (theirs["boxes"][:, 2:] > theirs["boxes"][:, :2]).all(dim=1)  # the others were set to zero
        theirs = theirs | {name: theirs[name][left] for name in ("boxes", "labels", "masks")}
        boxes = boxes.clip(0, [image.shape[1], image.shape[0]] * 2)
    assert np.array_equal(image, theirs["image"].permute(1, 2, 0).numpy())
    assert rows.tolist() == theirs["labels"].tolist()
    np.testing.assert_allclose(boxes, theirs["boxes"].numpy(), atol=1e-3)
    assert np.array_equal(masks, theirs["masks"].numpy())


@pytest.mark.parametrize("seed", range(8))
def test_zoom_out_equals_torchvisions_on_the_same_draws(seed):
    sample, theirs = scattered(seed)
    torch.manual_seed(seed)
    expected = v2.RandomZoomOut(fill={tv_tensors.Mask: 0, "others": 7}, p=1.0)(theirs)
    torch.manual_seed(seed)
    torch.rand(1)  # torchvision's draw of whether to apply it
    assert_equal(ours(RandomZoomOut(fill=7), sample), expected)


@pytest.mark.parametrize("seed", range(24))
def test_iou_crop_equals_torchvisions_on_the_same_draws(seed):
    sample, theirs = scattered(seed)
    torch.manual_seed(seed)
    result = ours(RandomIoUCrop(), sample)
    torch.manual_seed(seed)
    assert_equal(result, v2.RandomIoUCrop()(theirs), sanitize=True)


def test_the_crops_of_several_seeds_differ_and_remove_objects():
    sizes, numbers = set(), set()
    for seed in range(24):
        torch.manual_seed(seed)
        image, _, rows, _ = ours(RandomIoUCrop(), scattered(0)[0])
        sizes.add(image.shape)
        numbers.add(len(rows))
    assert len(sizes) > 10 and len(numbers) > 3


def test_iou_crop_leaves_an_image_without_objects_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    crop = ComposedTransforms(transforms=[dict(type="RandomIoUCrop", p=1.0)])
    empty = AnnotatedImage(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int64))
    assert all(np.array_equal(crop(empty, seed=seed).image, image) for seed in range(5))
    assert all(np.array_equal(crop(AnnotatedImage(image), seed=seed).image, image) for seed in range(5))


@pytest.mark.parametrize("change", ["brightness", "contrast", "saturation", "hue"])
@pytest.mark.parametrize("end", [0, 1])
def test_each_distortion_is_torchvisions_up_to_rounding(change, end):
    transform = PhotometricDistort()
    value = (-0.05, 0.05)[end] if change == "hue" else getattr(transform, change)[end]
    neutral = dict(brightness=1, contrast=1, saturation=1, hue=0, contrast_first=True, channels=[0, 1, 2])
    draw = np.random.default_rng(0)
    image = np.kron(draw.integers(0, 256, (12, 16, 3), np.uint8), np.ones((4, 4, 1), np.uint8))
    adjust = getattr(tvf, f"adjust_{change}")
    expected = adjust(torch.from_numpy(image).permute(2, 0, 1), value).permute(1, 2, 0).numpy()
    result = transform.apply(image, **{**neutral, change: value})
    difference = np.abs(result.astype(int) - expected.astype(int))
    # The hue has 256 levels here.
    assert difference.max() <= (8 if change == "hue" else 1), difference.max()
    assert np.abs(result.astype(int) - image.astype(int)).mean() > 3 * difference.mean()


def test_distortions_are_applied_in_the_drawn_order_and_permute_the_channels():
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    transform = PhotometricDistort()
    drawn = dict(brightness=1, contrast=1.5, saturation=0.5, hue=0, channels=[2, 0, 1])
    first, last = (transform.apply(image, **drawn, contrast_first=order) for order in (True, False))
    planes = torch.from_numpy(image).permute(2, 0, 1)
    contrast, saturation = (lambda x: tvf.adjust_contrast(x, 1.5)), (lambda x: tvf.adjust_saturation(x, 0.5))
    for result, expected in ((first, saturation(contrast(planes))), (last, contrast(saturation(planes)))):
        assert np.abs(result.astype(int) - expected[[2, 0, 1]].permute(1, 2, 0).numpy().astype(int)).max() <= 3
    assert not np.array_equal(first, last)


def test_probabilities_and_ranges_of_the_distortion_are_those_of_torchvision():
    transform, theirs = PhotometricDistort(), v2.RandomPhotometricDistort()
    transform.set_random_state(np.random.default_rng(0), random.Random(0))
    torch.manual_seed(0)
    image = [tv_tensors.Image(torch.zeros(3, 4, 4, dtype=torch.uint8))]
    drawn = [transform.get_params() for _ in range(2000)]
    expected = [theirs.make_params(image) for _ in range(2000)]
    for name, neutral in (("brightness", 1), ("contrast", 1), ("saturation", 1), ("hue", 0)):
        values = [params[name] for params in drawn if params[name] != neutral]
        reference = [params[f"{name}_factor"] for params in expected if params[f"{name}_factor"] is not None]
        assert abs(len(values) - len(reference)) < 130  # 1000 each, with a deviation of 22
        ends, expected_ends = (np.quantile(each, [0, 0.5, 1]) for each in (values, reference))
        np.testing.assert_allclose(ends, expected_ends, atol=0.1 * (expected_ends[2] - expected_ends[0]))
    assert abs(sum(p["channels"] != [0, 1, 2] for p in drawn) - 2000 * 5 / 12) < 100
    assert abs(sum(p["contrast_first"] for p in drawn) - 1000) < 100


RECIPE = ComposedTransforms(
    transforms=[
        dict(type="PhotometricDistort"),
        dict(type="RandomZoomOut", p=0.5),
        dict(type="RandomIoUCrop", p=0.8),
        dict(type="HorizontalFlip"),
    ],
    min_visible=0.0,
    min_box_side=1.0,
)


@pytest.mark.parametrize("seed", range(12))
def test_boxes_labels_and_masks_follow_the_image_and_the_seed(seed):
    geometry = ComposedTransforms(
        transforms=[dict(type="RandomZoomOut", p=0.5), dict(type="RandomIoUCrop", p=0.8)], min_visible=0.0
    )
    sample = blocks(120, 160)
    assert_consistent(geometry(sample, seed=seed))
    first, again = RECIPE(sample, seed=seed), RECIPE(sample, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(first[:4], again[:4]))
    assert np.array_equal(sample.image, blocks(120, 160).image)


def test_pixels_are_changed_by_some_seeds_only():
    sizes = {RECIPE(blocks(120, 160), seed=seed).image.shape for seed in range(20)}
    assert len(sizes) > 8


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (dict(type="RandomZoomOut", side_range=[0.5, 2.0]), r"RandomZoomOut: side_range is \[0.5, 2.0\]; expected"),
        (dict(type="RandomIoUCrop", scale_range=[0.5, 2.0]), r"RandomIoUCrop: scale_range is .* in 0\.\.1"),
        (dict(type="RandomIoUCrop", aspect_range=[2.0, 0.5]), r"RandomIoUCrop: aspect_range is .* above 0"),
        (dict(type="RandomIoUCrop", min_ious=[0.5]), r"RandomIoUCrop: min_ious is \[0.5\] .* means no crop"),
        (dict(type="RandomIoUCrop", fill=0), "RandomIoUCrop: unknown argument 'fill'"),
    ],
)
def test_impossible_arguments_are_errors(spec, message):
    with pytest.raises(ConfigError, match=message):
        ComposedTransforms(transforms=[spec])


def test_names_are_not_albumentations_own():
    assert not any(hasattr(A, name) for name in ("RandomZoomOut", "RandomIoUCrop", "PhotometricDistort"))
