"""The data sections of segmentation configs: valid, and fitting the official folder layouts."""

import json

import numpy as np
import pytest
from PIL import Image

from vitkit.config import load_config
from vitkit.configs.parts.ade20k import CLASSES, ade20k_instance, ade20k_panoptic, ade20k_semantic
from vitkit.configs.parts.camvid import camvid
from vitkit.configs.parts.cityscapes import cityscapes_semantic
from vitkit.configs.parts.coco_instance import coco_instance
from vitkit.configs.parts.coco_panoptic import coco_panoptic, coco_panoptic_multi_scale
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset

PARTS = {
    part.__name__: part
    for part in (
        ade20k_instance,
        ade20k_panoptic,
        ade20k_semantic,
        camvid,
        cityscapes_semantic,
        coco_instance,
        coco_panoptic,
        coco_panoptic_multi_scale,
    )
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_valid(name, tmp_path):
    (tmp_path / "part.json").write_text(json.dumps({"data": PARTS[name]()}))
    data = DataSettings(**load_config(tmp_path / "part.json")["data"])
    assert data.train["type"] == data.val["type"]


def test_ade20k_has_150_distinct_class_names():
    assert len(set(CLASSES)) == len(CLASSES) == 150


def test_cityscapes_has_the_expected_folders_and_ids(tmp_path):
    data = cityscapes_semantic(root=str(tmp_path))
    ids = np.array([[0, 7, 33], [34 - 1, 26, 255]], np.uint8)
    for folder, ending, image in (
        ("leftImg8bit", "leftImg8bit", Image.new("RGB", (3, 2))),
        ("gtFine", "gtFine_labelIds", Image.fromarray(ids)),
        ("gtFine", "gtFine_instanceIds", Image.fromarray(ids)),
    ):
        path = tmp_path / folder / "val" / "ulm" / f"ulm_000000_000019_{ending}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    dataset = build_dataset(data["val"], data["root"])
    assert dataset.image_ids == ["ulm/ulm_000000_000019"] and len(dataset.classes) == 19
    assert dataset.load_semantic(0).tolist() == [[255, 0, 18], [18, 13, 255]]


def test_coco_parts_read_their_datasets(shared_data):
    for part, name in ((coco_panoptic, "coco_panoptic"), (coco_instance, "coco_tiny")):
        data = part(root=str(shared_data / name), size=64)
        sample = build_dataset(data["train"], data["root"])[(0, 0)]
        assert sample["image"].shape == (3, 64, 64)
        assert sample["target"]["masks"].flatten(1).any(1).all()
        build_dataset(data["val"], data["root"])
