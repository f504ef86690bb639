"""Mosaic, copy-paste and mixup: pixels, boxes, labels and masks that stay together, by hand on small flat images."""

import numpy as np
import pytest
import torch
from helpers.annotated_images import flat, shapes

from vitkit.config import check_config
from vitkit.config.load import load_config
from vitkit.data.loading.splits import build_dataset
from vitkit.data.transforms.mosaic_mixup import MultiImageTransforms, Visibility, blend, make_mosaic, paste_objects
from vitkit.errors import ConfigError

KEEP_ALL = Visibility(0.0, 1e-3)


def assert_masks_fill_boxes(result):
    assert len(result.boxes_xyxy) == len(result.labels) == len(result.masks)
    for mask, box in zip(result.masks, result.boxes_xyxy):
        ys, xs = np.nonzero(mask)
        np.testing.assert_array_equal(box, [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])


def test_a_mosaic_of_halves_fills_the_canvas():
    samples = [flat(10 * i, [(2, 2, 6, 6)], [i]) for i in range(4)]
    result = make_mosaic(samples, (8, 8), (4, 4), np.full(4, 0.5), KEEP_ALL)
    quarters = [result.image[:4, :4], result.image[:4, 4:], result.image[4:, :4], result.image[4:, 4:]]
    assert [np.unique(quarter).tolist() for quarter in quarters] == [[0], [10], [20], [30]]
    assert result.boxes_xyxy.tolist() == [[1, 1, 3, 3], [5, 1, 7, 3], [1, 5, 3, 7], [5, 5, 7, 7]]
    assert result.labels.tolist() == [0, 1, 2, 3]
    assert_masks_fill_boxes(result)


def test_mosaic_images_meet_at_the_center_and_are_cropped_at_the_canvas():
    # At full size, the first image ends at (2, 4): its columns 6 and 7 and its rows from 4 on are visible.
    first = flat(50, [(0, 0, 8, 8), (0, 0, 6, 8), (4, 0, 8, 8)], [1, 2, 3])
    rest = [flat(90, [], []) for _ in range(3)]
    result = make_mosaic([first, *rest], (8, 8), (2, 4), np.array([1, 0.5, 0.5, 0.5]), KEEP_ALL, pad_value=7)
    assert (result.image[:4, :2] == 50).all() and (result.image[:4, 2:6] == 90).all()
    assert (result.image[:, 6:] == 7).all() and (result.image[4:, :2] == 90).all()
    assert result.boxes_xyxy.tolist() == [[0, 0, 2, 4], [0, 0, 2, 4]] and result.labels.tolist() == [1, 3]
    assert_masks_fill_boxes(result)
    # 1/8 and 1/4 of their areas are left.
    for visibility, labels in ((Visibility(0.2, 1), [3]), (Visibility(0.1, 3), []), (Visibility(0.125, 2), [1, 3])):
        result = make_mosaic([first, *rest], (8, 8), (2, 4), np.array([1, 0.5, 0.5, 0.5]), visibility)
        assert result.labels.tolist() == labels and len(result.masks) == len(labels)


def test_mosaic_images_keep_their_aspect_ratio():
    wide = flat(60, [(0, 0, 16, 4)], [5], size=(4, 16), masks=False)
    rest = [flat(0, [], [], masks=False) for _ in range(3)]
    result = make_mosaic([rest[0], rest[1], rest[2], wide], (8, 8), (4, 4), np.ones(4), KEEP_ALL)
    # Fitted into 8x8, the image is 8x2, of which the left half is inside.
    assert result.boxes_xyxy.tolist() == [[4, 4, 8, 6]] and (result.image[4:6, 4:] == 60).all()
    assert result.masks is None and result.boxes_xyxy.dtype == np.float32


def test_pasted_objects_cover_those_below():
    below = flat(0, [(0, 0, 4, 4), (2, 0, 6, 4), (4, 4, 8, 8)], [0, 1, 2])
    other = flat(200, [(0, 0, 5, 4), (6, 6, 8, 8)], [7, 8])
    result = paste_objects(below, other, np.array([True, False]), KEEP_ALL)
    assert result.labels.tolist() == [1, 2, 7]
    assert result.boxes_xyxy.tolist() == [[5, 0, 6, 4], [4, 4, 8, 8], [0, 0, 5, 4]]
    assert_masks_fill_boxes(result)
    assert (result.image[:4, :5] == 200).all() and not result.image[4:].any() and not result.image[:, 5:].any()
    assert below.masks[1].sum() == 16 and not below.image.any()  # the arguments are left unchanged
    # A quarter of the second object is left, one pixel wide.
    for visibility, labels in (
        (Visibility(0.3, 1), [2, 7]),
        (Visibility(0.25, 1), [1, 2, 7]),
        (Visibility(0, 2), [2, 7]),
    ):
        assert paste_objects(below, other, np.array([True, False]), visibility).labels.tolist() == labels


def test_pasting_nothing_leaves_the_image_unchanged():
    below, other = flat(0, [(0, 0, 4, 4)], [0]), flat(200, [(0, 0, 5, 4)], [7])
    assert paste_objects(below, other, np.array([False]), KEEP_ALL) is below


def test_objects_of_an_image_of_another_size_are_cut_at_the_border():
    below = flat(0, [(0, 0, 2, 2)], [0], size=(4, 6))
    other = flat(200, [(4, 1, 9, 8), (7, 0, 9, 2)], [7, 8], size=(8, 9))
    result = paste_objects(below, other, np.array([True, True]), KEEP_ALL)
    assert result.labels.tolist() == [0, 7] and result.boxes_xyxy.tolist() == [[0, 0, 2, 2], [4, 1, 6, 4]]
    assert result.image.shape == (4, 6, 3) and (result.image[1:, 4:] == 200).all() and not result.image[0].any()
    small = flat(200, [(0, 0, 2, 2)], [7], size=(3, 3))
    assert (paste_objects(below, small, np.array([True]), KEEP_ALL).image[:2, :2] == 200).all()


def test_mixup_averages_and_keeps_the_objects_of_both():
    first, other = flat(100, [(0, 0, 4, 4)], [0], size=(6, 6)), flat(200, [(1, 1, 8, 5)], [1], size=(5, 8))
    result = blend(first, other, 0.75, KEEP_ALL)
    assert (result.image[:5] == 125).all() and (result.image[5:] == 100).all()
    assert result.labels.tolist() == [0, 1] and result.boxes_xyxy.tolist() == [[0, 0, 4, 4], [1, 1, 6, 5]]
    assert_masks_fill_boxes(result)


FLIP = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip")])


def test_dataset_mixes_images_depending_only_on_the_seed():
    spec = dict(type="MultiImageTransforms", transforms=FLIP, mosaic=0.5, copy_paste=0.5, mixup=0.5)
    first, second = shapes(spec), shapes(spec)
    order = [(index, seed) for seed in range(6) for index in range(6)]
    samples = {key: first[key] for key in order}
    for key in reversed(order):  # whatever was loaded before, as after a resume or in another worker
        again = second[key]
        assert torch.equal(samples[key]["image"], again["image"])
        for name, value in samples[key]["target"].items():
            assert (
                torch.equal(value, again["target"][name]) if torch.is_tensor(value) else value == again["target"][name]
            )
    assert not torch.equal(samples[0, 0]["image"], samples[0, 1]["image"])
    without_seeds = [first[0]["image"] for _ in range(12)]  # two are equal once in 128 times
    assert not all(torch.equal(without_seeds[0], image) for image in without_seeds[1:])


@pytest.mark.parametrize("kind", ["mosaic", "copy_paste", "mixup"])
def test_boxes_enclose_the_masks_of_a_real_sample(kind):
    dataset = shapes(dict(type="MultiImageTransforms", min_visible=0.0, min_box_side=0.0, **{kind: 1.0}))
    counts = []
    for seed in range(8):
        target = dataset[0, seed]["target"]
        boxes = target["boxes_cxcywh"] * 64
        corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1)
        for mask, box in zip(target["masks"], corners):
            ys, xs = mask.nonzero().unbind(1)
            around = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).float()
            # If a mosaic cuts a round shape, the cut box may extend beyond the remaining pixels.
            assert (around[:2] >= box[:2] - 1.6).all() and (around[2:] <= box[2:] + 1.6).all()
            if kind != "mosaic":
                torch.testing.assert_close(box, around, atol=1.6, rtol=0)
        counts.append(len(boxes))
    assert max(counts) > len(shapes(None)[0]["target"]["labels"])


def test_the_probabilities_are_those_of_the_arguments():
    dataset = shapes(dict(type="MultiImageTransforms", mosaic=0.25))
    plain = shapes(None)[0]["image"]
    changed = sum(not torch.equal(dataset[0, seed]["image"], plain) for seed in range(400))
    assert 70 <= changed <= 130  # 100 with a deviation of 8.7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(), "mosaic, copy_paste and mixup are all 0"),
        (dict(mosaic=1.5), "mosaic is 1.5; expected 0 to 1"),
        (dict(mixup=1.0, min_visible=-1), "min_visible is -1; expected 0 to 1"),
        (dict(mosaic=1.0, mosaic_scale=(1.0, 0.5)), r"mosaic_scale is \(1.0, 0.5\); expected \(minimum, maximum\)"),
        (dict(mosaic=1.0, min_box_side=-1), "min_box_side is -1; expected pixels"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MultiImageTransforms(**arguments)


def test_unsupported_datasets_are_an_error_when_built():
    with pytest.raises(ConfigError, match=r"copy_paste=0.5 pastes objects by their masks.*Set its masks=True"):
        shapes(dict(type="MultiImageTransforms", copy_paste=0.5), masks=False)
    with pytest.raises(ConfigError, match="ShapesSegmentation: MultiImageTransforms needs images with boxes"):
        build_dataset(
            dict(type="ShapesSegmentation", num_images=2, transforms=dict(type="MultiImageTransforms", mosaic=1))
        )
    with pytest.raises(ConfigError, match="for a dataset's training images"):
        MultiImageTransforms(mosaic=1.0)(flat(0, [], []))


def test_configs_are_checked_including_nested_transforms():
    cfg = load_config("configs/quickstart/detr.py")
    cfg["data"]["train"]["transforms"] = dict(type="MultiImageTransforms", mosaic=0.5, transforms=FLIP)
    check_config(cfg)
    cfg["data"]["train"]["transforms"]["transforms"] = dict(type="ComposedTransformz")
    with pytest.raises(ConfigError, match=r"data\.train\.transforms\.transforms.*Did you mean 'ComposedTransforms'"):
        check_config(cfg)
