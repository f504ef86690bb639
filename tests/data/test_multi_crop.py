"""Several views of an image: their sizes, order, seeds, and the batch that they become."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.data.transforms.annotated_image import AnnotatedImage
from vitkit.data.transforms.multi_crop import MultiCrop
from vitkit.errors import ConfigError
from vitkit.registry import DATASETS, TRANSFORMS

CROPS = dict(type="MultiCrop", size=32, small_size=16, num_small=3)
WORLD = dict(type="ShapesClassification", num_images=4, image_size=24)


def photo(height=40, width=60):
    rows, columns = np.indices((height, width))
    return np.stack([rows * 255 // height, columns * 255 // width, np.full_like(rows, 128)], -1).astype(np.uint8)


def test_views_are_two_large_and_several_small_ones_that_depend_on_the_seed_only():
    transforms = TRANSFORMS.build(CROPS)
    state = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    first, again, other = (transforms.views(photo(), seed=seed) for seed in (2**64 - 1, 2**64 - 1, 3))
    assert random.getstate() == state[0] and (np.random.get_state()[1] == state[1]).all()
    assert torch.equal(torch.get_rng_state(), state[2])
    assert [view.shape for view in first] == [(32, 32, 3)] * 2 + [(16, 16, 3)] * 3
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    views = [*first, *other]
    assert not any(np.array_equal(a, b) for i, a in enumerate(views) for b in views[:i])


def test_large_and_small_crops_cover_their_fractions_of_the_image():
    # Red and green tell the row and column that a pixel is from; neither blur nor colors change them here.
    transforms = MultiCrop(size=32, small_size=16, num_small=1)
    for crop in transforms._crops:
        crop.transforms = crop.transforms[:2]
    shares = []
    for seed in range(60):
        for view in transforms.views(photo(200, 200), seed=seed):
            height, width = (int(view[..., c].max()) - int(view[..., c].min()) + 255 / len(view) for c in (0, 1))
            shares.append(height * width / 255**2)
    large, small = np.array(shares).reshape(-1, 3)[:, :2], np.array(shares).reshape(-1, 3)[:, 2]
    assert 0.35 < large.min() < 0.5 and 0.9 < large.max() < 1.1
    assert 0.04 < small.min() < 0.12 and 0.3 < small.max() < 0.45


@pytest.mark.parametrize(
    ("index", "probabilities", "scale"),
    [(0, [1.0], (0.4, 1.0)), (1, [0.1, 0.2], (0.4, 1.0)), (2, [0.5], (0.05, 0.4))],
    ids=["first", "second", "small"],
)
def test_blur_and_solarization_are_those_of_each_view(index, probabilities, scale):
    crop = MultiCrop(size=32, small_size=16)._crops[index]
    resize, flip, colors, gray, *rest = crop.transforms
    assert colors.p == 0.8 and gray.p == 0.2 and flip.p == 0.5
    assert [getattr(step, "p", 1.0) for step in rest] == probabilities and resize.scale == scale


@pytest.mark.parametrize("size", [(1, 1), (5, 300), (16, 9)])
def test_images_smaller_than_the_crops_are_enlarged(size):
    views = TRANSFORMS.build(CROPS).views(photo(*size), seed=0)
    assert {view.shape for view in views} == {(32, 32, 3), (16, 16, 3)}


def test_a_batch_has_the_views_of_all_images_one_after_another():
    dataset = build_dataset(dict(type="UnlabeledImages", source=WORLD, transforms=CROPS))
    samples = [dataset[(i, 10 + i)] for i in range(3)]
    assert len(samples[0]["views"]) == 5 and samples[0]["image"] is samples[0]["views"][0]
    assert samples[0]["target"]["image_size"] == (32, 32) and samples[0]["target"]["original_size"] == (24, 24)
    batch = dataset.collate(samples)
    assert batch.inputs["images"].shape == (6, 3, 32, 32) and batch.inputs["small_images"].shape == (9, 3, 16, 16)
    assert torch.equal(batch.inputs["images"][3 + 1], samples[1]["views"][1])
    assert torch.equal(batch.inputs["small_images"][2 * 3 + 2], samples[2]["views"][4])
    assert len(batch) == 3
    only_large = build_dataset(dict(type="UnlabeledImages", source=WORLD, transforms=dict(CROPS, num_small=0)))
    assert only_large.collate([only_large[0]]).inputs.keys() == {"images"}


def test_worker_processes_load_the_same_views():
    spec = dict(type="UnlabeledImages", source=WORLD, transforms=CROPS)
    batches = []
    for num_workers in (0, 1):
        settings = DataSettings(train=spec, images_per_gpu=2, num_workers=num_workers)
        loader = settings.train_loader(settings.dataset("train"), seed=5)
        loader.set_position(1)
        batches.append(list(loader))
    for one, other in zip(*batches, strict=True):
        assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in ("images", "small_images"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(small_size=48), r"small_size=48: expected 1 to size=32, that of the large crops"),
        (dict(num_small=-1), r"num_small=-1: expected at least 0"),
        (dict(scale=[0.0, 1.0]), r"scale=\(0.0, 1.0\): expected fractions of the image's area"),
        (dict(small_scale=[0.5, 0.1]), r"small_scale=\(0.5, 0.1\): expected fractions of the image's area"),
    ],
)
def test_impossible_crops_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        TRANSFORMS.build(dict(CROPS, **changes))


def test_datasets_with_one_image_per_sample_are_rejected(tmp_path):
    folder = tmp_path / "cat"
    folder.mkdir()
    Image.new("RGB", (9, 9)).save(folder / "a.png")
    dataset = DATASETS.build("ImageFolder", folder=tmp_path, transforms=CROPS)
    with pytest.raises(ConfigError, match=r"MultiCrop makes several views .* data.train=dict\(type='UnlabeledImages'"):
        dataset[0]
    with pytest.raises(ConfigError, match="MultiCrop"):
        TRANSFORMS.build(CROPS).views(np.zeros((9, 9, 4), np.uint16))
    with pytest.raises(ConfigError, match="several views"):
        TRANSFORMS.build(CROPS)(AnnotatedImage(photo()))


def test_views_are_not_squashed():
    images = dict(type="ShapesClassification", image_size=16, num_images=4)
    crops = dict(type="UnlabeledImages", source=images, transforms=dict(type="MultiCrop", size=16, small_size=8))
    data = DataSettings(train=crops, val=images, images_per_gpu=2, num_workers=0, squares=dict(sizes=[32]))
    with pytest.raises(ConfigError, match="data.squares: resizes an image only, .* have its views. Leave it out"):
        next(iter(data.train_loader(data.dataset("train"), seed=0)))
