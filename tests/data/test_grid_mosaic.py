"""DEIM's mosaic against torchvision's resize, paste and affine transform."""

import numpy as np
import pytest
import torch
from helpers.annotated_images import flat, shapes
from helpers.torchvision_images import scattered
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tvf

from vitkit.config import check_config
from vitkit.config.load import load_config
from vitkit.data.transforms.grid_mosaic import Affine, GridMosaic, make_grid, move
from vitkit.data.transforms.mosaic_mixup import Visibility
from vitkit.errors import ConfigError

KEEP_ALL = Visibility(0.0, 1e-3)
AFFINES = [
    Affine(0.0, (0, 0), 1.0), Affine(10.0, (0, 0), 1.0), Affine(-7.0, (12, -9), 0.5), Affine(3.0, (-20, 5), 1.4)
]  # fmt: skip


def test_grid_equals_resized_images_pasted_in_its_cells():
    samples, theirs = zip(*(scattered(i, height=60 + 20 * i, width=100 - 10 * i) for i in range(4)))
    grid = make_grid(list(samples), 50, 9)
    resized = [v2.Resize(50)(each) for each in theirs]
    sizes = [each["image"].shape[1:] for each in resized]
    height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
    assert grid.image.shape == (2 * height, 2 * width, 3)
    offsets = [(0, 0), (width, 0), (0, height), (width, height)]
    expected = torch.cat([each["boxes"] + torch.tensor([*at, *at]) for each, at in zip(resized, offsets)])
    np.testing.assert_allclose(grid.boxes_xyxy, expected.numpy(), atol=1e-3)
    assert grid.labels.tolist() == list(range(6)) * 4
    covered = np.zeros(grid.image.shape[:2], bool)
    for (h, w), (x, y) in zip(sizes, offsets):
        covered[y : y + h, x : x + w] = True
    assert (grid.image[~covered] == 9).all() and (grid.image[covered] != 9).any()
    assert not grid.masks[:, ~covered].any()
    for mask, (x0, y0, x1, y1) in zip(grid.masks, grid.boxes_xyxy):
        ys, xs = np.nonzero(mask)
        np.testing.assert_allclose([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], [x0, y0, x1, y1], atol=1)


@pytest.mark.parametrize("affine", AFFINES)
@pytest.mark.parametrize("seed", range(3))
def test_rotated_grid_equals_torchvisions_affine_transform(affine, seed):
    sample, theirs = scattered(seed, height=96, width=128)
    smooth = np.kron(sample.image[:12, :16], np.ones((8, 8, 1), np.uint8))
    sample = sample._replace(image=smooth)
    theirs["image"] = tv_tensors.Image(torch.from_numpy(smooth).permute(2, 0, 1))
    result = move(sample, affine, KEEP_ALL, 0)
    options = dict(angle=affine.degrees, translate=list(affine.shift), scale=affine.scale, shear=[0.0, 0.0])
    expected = {name: tvf.affine(theirs[name], **options) for name in ("boxes", "masks")}
    image = tvf.affine(theirs["image"], **options, interpolation=v2.InterpolationMode.BILINEAR)
    left = (expected["boxes"][:, 2:] - expected["boxes"][:, :2] >= 1e-3).all(dim=1)
    left &= expected["masks"].flatten(1).bool().any(dim=1)
    assert result.labels.tolist() == torch.arange(6)[left].tolist() and len(result.labels) > 1
    np.testing.assert_allclose(result.boxes_xyxy, expected["boxes"][left].numpy(), atol=1e-3)
    assert (result.masks != expected["masks"][left].numpy()).mean() < 0.005
    # Both interpolate linearly, but at different steps of rounding.
    difference = np.abs(result.image.astype(int) - image.permute(1, 2, 0).numpy().astype(int))
    assert difference.mean() < 2 and np.quantile(difference, 0.98) <= 8


def test_objects_that_the_edge_cuts_off_are_removed():
    sample = flat(50, [(0, 0, 4, 4), (4, 4, 8, 8), (5, 0, 8, 3)], [1, 2, 3])
    shifted = move(sample, Affine(0.0, (3, 0), 1.0), KEEP_ALL, 7)
    assert shifted.boxes_xyxy.tolist() == [[3, 0, 7, 4], [7, 4, 8, 8]] and shifted.labels.tolist() == [1, 2]
    assert (shifted.image[:, :3] == 7).all() and (shifted.image[:, 3:] == 50).all()
    assert shifted.masks.sum(axis=(1, 2)).tolist() == [16, 4]
    assert move(sample, Affine(0.0, (3, 0), 1.0), Visibility(0.5, 1.0), 7).labels.tolist() == [1]


@pytest.mark.parametrize("size", [(1, 3000), (4000, 4)])
def test_a_mosaic_of_a_strip_has_sides_that_opencv_takes(size):
    strip = flat(50, [(0, 0, *size[::-1])], [1], size=size)
    grid = make_grid([strip, *(flat(90, [(0, 0, 4, 4)], [2]) for _ in range(3))], 320, 0)
    assert max(grid.image.shape) < 32767 and len(grid.labels) == 4
    moved = move(grid, Affine(0.0, (0, 0), 0.9), KEEP_ALL, 0)
    assert len(moved.labels) == len(moved.masks) == 4 and (moved.image == 50).any()


FLIP = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip")])
CROP = dict(type="ComposedTransforms", transforms=[dict(type="RandomIoUCrop")])


def test_dataset_makes_mosaics_depending_only_on_the_seed():
    spec = dict(type="GridMosaic", transforms=FLIP, otherwise=CROP, tile=32)
    first, second = shapes(spec), shapes(spec)
    samples = {seed: first[0, seed] for seed in range(20)}
    for seed in reversed(range(20)):
        again = second[0, seed]
        assert torch.equal(samples[seed]["image"], again["image"])
        for name in ("labels", "boxes_cxcywh", "masks"):
            assert torch.equal(samples[seed]["target"][name], again["target"][name])
    numbers = [len(sample["target"]["labels"]) for sample in samples.values()]
    assert max(numbers) > len(shapes(None)[0]["target"]["labels"]) > min(numbers)


def test_a_mosaic_excludes_what_other_images_get():
    marked = dict(type="ComposedTransforms", transforms=[dict(type="Resize", height=40, width=40)])
    dataset = shapes(dict(type="GridMosaic", otherwise=marked, tile=32, probability=0.25))
    sizes = [tuple(dataset[0, seed]["image"].shape[1:]) for seed in range(200)]
    assert set(sizes) == {(64, 64), (40, 40)}
    assert 25 <= sizes.count((64, 64)) <= 75  # 50 with a deviation of 6


def test_drawn_transforms_stay_in_their_ranges():
    mosaic, random = GridMosaic(rotation=10, translation=0.1, scale=(0.5, 1.5)), np.random.default_rng(0)
    drawn = [mosaic._draw(400, 600, random) for _ in range(500)]
    for values, low, high in (
        ([a.degrees for a in drawn], -10, 10),
        ([a.shift[0] for a in drawn], -60, 60),
        ([a.shift[1] for a in drawn], -40, 40),
        ([a.scale for a in drawn], 0.5, 1.5),
    ):
        assert low <= min(values) < low + 0.1 * (high - low) and high - 0.1 * (high - low) < max(values) <= high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(probability=2), "probability is 2; expected 0 to 1"),
        (dict(scale=(1.5, 0.5)), r"scale is \(1.5, 0.5\); expected"),
        (dict(tile=0), "tile is 0; expected at least 1 pixel"),
        (dict(rotation=-1), "rotation is -1; expected at least 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GridMosaic(**arguments)


def test_configs_are_checked_including_both_nested_transforms():
    cfg = load_config("configs/quickstart/detr.py")
    for name in ("transforms", "otherwise"):
        cfg["data"]["train"]["transforms"] = dict(type="GridMosaic", **{name: dict(type="ComposedTransformz")})
        with pytest.raises(ConfigError, match=r"data\.train\.transforms.*Did you mean 'ComposedTransforms'"):
            check_config(cfg)
    cfg["data"]["train"]["transforms"] = dict(type="GridMosaic", transforms=FLIP, otherwise=CROP)
    check_config(cfg)
    with pytest.raises(ConfigError, match="for a dataset's training images"):
        GridMosaic()(flat(0, [], []))
