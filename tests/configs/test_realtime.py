"""The recipe of real-time detectors: which augmentation is active in which epoch, and the published sizes."""

import pytest

from vitkit.config import check_config
from vitkit.config.load import load_config
from vitkit.configs.parts.realtime import deim_data, dfine_data, flat_cosine, square_sizes, training
from vitkit.data.loading.batch_augmentation import Mixup, Squares
from vitkit.data.loading.loader import DataSettings
from vitkit.data.transforms.by_epoch import TransformsByEpoch
from vitkit.data.transforms.grid_mosaic import GridMosaic
from vitkit.registry import TRANSFORMS


def names(transforms) -> list[str]:
    """Return the names of a pipeline's albumentations."""
    return [type(each).__name__ for each in transforms._compose.transforms]


STRONG = ["PhotometricDistort", "RandomZoomOut", "RandomIoUCrop", "HorizontalFlip"]


def test_sizes_are_those_of_the_originals():
    assert sorted(set(square_sizes(640, 6))) == list(range(480, 801, 32))
    assert square_sizes(640, 6).count(640) == 6 and len(square_sizes(640, 20)) == 30


def test_strong_augmentation_of_d_fine_stops():
    data = dfine_data(strong_until=72, size_repeats=4)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    assert isinstance(transforms, TransformsByEpoch)
    assert names(transforms.at(0)) == names(transforms.at(71)) == STRONG
    assert names(transforms.at(72)) == names(transforms.at(79)) == ["HorizontalFlip"]
    squares = Squares(**data["squares"])
    assert len(squares.sizes) == 14 and (squares.until_epoch, squares.final_size) == (72, 640)
    assert dfine_data(strong_until=148)["squares"] == dict(sizes=[640])


def test_augmentation_of_deim_has_four_parts():
    data = deim_data(4, 64, 120, size_repeats=20)
    transforms = TRANSFORMS.build(data["train"]["transforms"])
    for epoch in (0, 3, 120, 131):
        assert names(transforms.at(epoch)) == ["HorizontalFlip"]
    for epoch in (4, 63):
        mosaic = transforms.at(epoch)
        assert isinstance(mosaic, GridMosaic) and mosaic.tile == 320
        assert names(mosaic.transforms) == ["PhotometricDistort", "HorizontalFlip"]
        assert names(mosaic.otherwise) == STRONG
    assert names(transforms.at(64)) == names(transforms.at(119)) == STRONG
    mixup = Mixup(**data["mixup"])
    assert (mixup.from_epoch, mixup.until_epoch, mixup.share) == (4, 64, (0.45, 0.55))


@pytest.mark.parametrize("data", [dfine_data(120, size_repeats=20), deim_data(4, 64, 120, size_repeats=20)])
def test_sections_are_valid(data):
    cfg = load_config("configs/quickstart/detr.py")
    cfg["data"] = data
    cfg["train"] = training(132, 120)
    cfg["schedule"] = flat_cosine(64, 120)
    check_config(cfg)
    DataSettings(**data)


def test_other_datasets_take_the_recipe():
    own = dict(train=dict(type="ShapesDetection", num_images=4), val=dict(type="ShapesDetection", num_images=2))
    data = dfine_data(2, size=64, size_repeats=1, data=own)
    assert data["train"]["type"] == "ShapesDetection" and data["squares"]["sizes"] == [32, 64]
    dataset = DataSettings(**data).dataset("train")
    assert dataset.transforms_by_epoch is not None
