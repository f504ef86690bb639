"""The recipe's sizes, and boxes, labels and masks that stay together."""

import subprocess
import sys

import numpy as np
import pytest
from helpers.annotated_images import assert_consistent, blocks
from PIL import Image

from vitkit.config import check_config
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.pipelines import ComposedTransforms, DETRTrainTransforms, EvalResize
from vitkit.errors import ConfigError, DataError
from vitkit.registry import TRANSFORMS

SCALES = set(range(480, 801, 32))


@pytest.mark.parametrize("seed", range(12))
def test_boxes_labels_and_masks_follow_the_image(seed):
    assert_consistent(DETRTrainTransforms()(blocks(), seed=seed))


def test_sizes_are_those_of_the_recipe():
    transforms = DETRTrainTransforms(crop_probability=0.0)
    image = np.zeros((480, 640, 3), np.uint8)
    shapes = [transforms(AnnotatedImage(image), seed=seed).image.shape[:2] for seed in range(200)]
    assert {height for height, _ in shapes} == SCALES
    assert all((height, width) == (height, int(height * 640 / 480)) for height, width in shapes)


def test_cropped_sizes_are_those_of_the_recipe():
    transforms = DETRTrainTransforms()
    image = np.zeros((100, 400, 3), np.uint8)  # 1600x400 and more before the crop, which is up to 600 wide
    whole = cropped = 0
    for seed in range(300):
        height, width = transforms(AnnotatedImage(image), seed=seed).image.shape[:2]
        assert max(height, width) <= 1333
        if width / height > 3.9:
            whole += 1
        else:
            cropped += 1
            assert 384 / 600 - 0.01 < width / height < 600 / 384 + 0.01
            assert min(height, width) in SCALES
    assert 110 < whole < 190 and whole + cropped == 300


def test_flip_and_crop_are_independent():
    """Sharing one seed between transforms would couple them."""
    image = np.zeros((100, 400, 3), np.uint8)
    image[:, :200] = 255
    transforms = DETRTrainTransforms()
    results = [transforms(AnnotatedImage(image), seed=seed).image for seed in range(60)]
    flipped_and_whole = {(result[0, 0, 0] == 0, result.shape[1] / result.shape[0] > 3.9) for result in results}
    assert len(flipped_and_whole) == 4


def test_seed_determines_everything_and_no_seed_is_random():
    transforms, data = DETRTrainTransforms(), blocks()
    first = transforms(data, seed=5)
    transforms(data)
    again = transforms(data, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(first[:4], again[:4]))
    assert len({transforms(data).image.shape for _ in range(20)}) > 5


def test_objects_outside_the_crop_lose_masks_and_labels_too():
    transforms = ComposedTransforms(transforms=[{"type": "Crop", "x_min": 0, "y_min": 0, "x_max": 260, "y_max": 220}])
    result = transforms(blocks())
    assert result.labels.tolist() == [0] and result.masks.shape == (1, 220, 260)
    assert result.boxes_xyxy.tolist() == [[20, 30, 220, 180]]


def test_box_that_ends_where_the_crop_begins_is_dropped():
    image = np.zeros((100, 100, 3), np.uint8)
    boxes = np.array([[0, 0, 50, 50], [50, 50, 60, 60]], np.float32)
    for top in (0, 50):
        crop = {"type": "Crop", "x_min": 50, "x_max": 90, "y_min": top, "y_max": 90}
        result = ComposedTransforms(transforms=[crop])(AnnotatedImage(image, boxes, np.array([1, 2])))
        assert result.labels.tolist() == [2]


def test_every_object_may_vanish():
    crop = {"type": "Crop", "x_min": 630, "y_min": 470, "x_max": 640, "y_max": 480}
    result = ComposedTransforms(transforms=[crop, {"type": "HorizontalFlip", "p": 1.0}])(blocks())
    assert result.boxes_xyxy.shape == (0, 4) and result.masks.shape == (0, 10, 10) and len(result.labels) == 0


def test_image_smaller_than_the_crop_range_is_cropped():
    image = np.zeros((3, 5, 3), np.uint8)
    transforms = DETRTrainTransforms(crop_scales=[3], crop_probability=1.0, scales=[6], max_size=12)
    result = transforms(AnnotatedImage(image, np.array([[0, 0, 5, 3]], np.float32), np.array([1])), seed=0)
    assert result.image.shape == (6, 10, 3) and result.boxes_xyxy.tolist() == [[0, 0, 10, 6]]


def test_evaluation_resizes_like_pillow_and_torchvision():
    functional = pytest.importorskip("torchvision.transforms.functional")
    boxes = blocks().boxes_xyxy
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    result = EvalResize(short_side=300, max_size=350)(blocks()._replace(image=image))
    assert result.image.shape == (262, 349, 3)
    expected = functional.resize(Image.fromarray(image), [262, 349])
    assert np.array_equal(result.image, np.asarray(expected))
    relative = result.boxes_xyxy / np.array([349, 262] * 2), boxes / np.array([640, 480] * 2)
    np.testing.assert_allclose(*relative, rtol=1e-6)
    assert result.masks.shape == (3, 262, 349)


def test_both_sides_may_be_rounded_to_the_nearest_pixel():
    fitted = EvalResize(short_side=640, max_size=640, rounding="nearest")
    assert fitted.size_of(333, 500) == (426, 640)  # DETR's rule would give 426 x 639
    assert EvalResize(short_side=640, max_size=640).size_of(333, 500) == (426, 639)
    assert fitted.size_of(500, 100) == (640, 128)
    covering = EvalResize(short_side=512, max_size=None, rounding="nearest")
    assert covering.size_of(375, 500) == (512, 683) and covering.size_of(5000, 100) == (25600, 512)
    with pytest.raises(ConfigError, match="rounding is 'up'; expected 'detr' or 'nearest'"):
        EvalResize(rounding="up")


def test_evaluation_may_resize_to_one_size_whatever_the_proportions():
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    result = EvalResize(size=[160, 320])(blocks()._replace(image=image))
    expected = Image.fromarray(image).resize((320, 160), Image.Resampling.BILINEAR)
    assert np.array_equal(result.image, np.asarray(expected)) and result.masks.shape == (3, 160, 320)
    np.testing.assert_allclose(result.boxes_xyxy, blocks().boxes_xyxy * np.array([0.5, 1 / 3] * 2), rtol=1e-6)
    for arguments, message in (
        (dict(size=(640, 640), short_side=512), r"size=\(640, 640\) resizes every .* so short_side=512, .* no effect"),
        (dict(size=(640, 640), rounding="nearest"), "rounding='nearest' have no effect. Set size=None to keep"),
        (dict(size=(640, 0)), r"size is \(640, 0\); expected \(height, width\), at least 1 pixel each"),
        (dict(size=(640,)), r"size is \(640,\); expected \(height, width\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            EvalResize(**arguments)


def test_composed_transforms_move_boxes_and_masks():
    transforms = TRANSFORMS.build(
        {
            "type": "ComposedTransforms",
            "transforms": [
                {"type": "OneOf", "transforms": [{"type": "VerticalFlip", "p": 1.0}], "p": 1.0},
                {"type": "GaussNoise", "std_range": (0.01, 0.01)},
                {"type": "MultiScaleCrop", "scales": [200], "crop_scales": [200], "crop_range": (100, 150)},
            ],
        }
    )
    for seed in range(4):
        result = transforms(blocks(), seed=seed)
        assert min(result.image.shape[:2]) == 200
        assert_consistent(result)


BAD_SPECS = {
    "unknown": ({"type": "HorizontalFlop"}, r"transforms\[0\]: unknown transform 'HorizontalFlop'. .*HorizontalFlip"),
    "argument": ({"type": "HorizontalFlip", "prob": 0.5}, r"HorizontalFlip: unknown argument 'prob'. .*Known: p"),
    "value": ({"type": "HorizontalFlip", "p": 7}, r"HorizontalFlip: (?s:.*)less than or equal to 1"),
    "inner": ({"type": "OneOf", "transforms": ["Flop"]}, r"transforms\[0\].transforms\[0\]: unknown transform 'Flop'"),
    "volumes": ({"type": "RandomCrop3D", "size": (1, 2, 3)}, "is for volumes"),
    "several images": ({"type": "Mosaic"}, "Mosaic needs mosaic_metadata, and a dataset's transforms get one image"),
    "several images within": ({"type": "OneOf", "transforms": [{"type": "FDA"}]}, "FDA needs fda_metadata"),
}


@pytest.mark.parametrize(("spec", "message"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_invalid_specs_are_errors(spec, message):
    with pytest.raises(ConfigError, match=message):
        ComposedTransforms(transforms=[spec])


def test_normalized_images_are_refused():
    with pytest.raises(ConfigError, match="not a uint8 RGB image"):
        ComposedTransforms(transforms=[{"type": "Normalize"}])(blocks())


def test_shrinking_averages_pixels():
    image = (np.indices((400, 400)).sum(axis=0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, axis=2)
    result = DETRTrainTransforms(scales=[100], crop_probability=0.0)(AnnotatedImage(image), seed=0)
    assert np.abs(result.image.astype(int) - 128).max() <= 1


def test_import_does_not_touch_the_network():
    code = (
        "import socket\n"
        "def refuse(*args, **kwargs): raise SystemExit('the network was asked')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import vitkit.data.transforms.pipelines"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=120)


def test_multi_image_transforms_are_refused_when_the_config_is_checked():
    mosaic = dict(type="ComposedTransforms", transforms=[dict(type="Mosaic")])
    train = dict(type="ShapesDetection", num_images=1, transforms=mosaic)
    with pytest.raises(ConfigError, match=r"data\.train\.transforms: .* Mosaic needs mosaic_metadata"):
        check_config({"data": {"train": train}})


def test_transform_errors_name_the_image_size():
    crop = ComposedTransforms(transforms=[{"type": "RandomCrop", "height": 9000, "width": 9000}])
    with pytest.raises(DataError, match=r"transforms: .* on an image of \d+x\d+ pixels .* with \d boxes: .*9000"):
        crop(blocks())


def test_slivers_left_by_a_crop_are_dropped_unless_the_recipe_keeps_them():
    # The crop keeps columns 0 to 50: all of the first box, half of the second, a tenth, a twentieth, one pixel.
    boxes = np.array(
        [[0, 10, 40, 20], [40, 10, 60, 20], [48, 10, 68, 20], [49, 10, 69, 20], [49, 30, 50, 40]], np.float32
    )
    sample = AnnotatedImage(np.zeros((100, 100, 3), np.uint8), boxes, np.arange(5))
    crop = [dict(type="Crop", x_min=0, y_min=0, x_max=50, y_max=100)]

    def labels(**options):
        return ComposedTransforms(transforms=crop, **options)(sample).labels.tolist()

    assert labels() == [0, 1, 2]
    assert labels(min_visible=0.3) == [0, 1]
    assert labels(min_visible=0.0) == [0, 1, 2]
    assert labels(min_visible=0.0, min_box_side=0.0) == [0, 1, 2, 3, 4]
    assert labels(min_visible=0.0, min_box_side=0.9) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["DETRTrainTransforms", "LargeScaleJitter"])
def test_recipes_keep_slivers_like_the_originals_and_can_drop_them(name):
    box = np.array([[0, 100, 320, 400]], np.float32)
    sample = AnnotatedImage(np.zeros((480, 640, 3), np.uint8), box, np.zeros(1, np.int64))

    def kept(**options):
        transforms = TRANSFORMS.build(dict(type=name, **options))
        return sum(len(transforms(sample, seed=seed).labels) for seed in range(60))

    assert kept(min_visible=0.9) < kept() and kept(min_box_side=300.0) < kept()


def test_invalid_fractions_and_side_lengths_are_errors():
    for options, message in ((dict(min_visible=2), "0 to 1"), (dict(min_box_side=-1), "from 0")):
        with pytest.raises(ConfigError, match=message):
            DETRTrainTransforms(**options)
