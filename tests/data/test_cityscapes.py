"""Cityscapes' folders, with synthetic files in the published layout."""

import cv2
import numpy as np
import pytest

from vitkit.config import load_config
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError, DataError

CAR, ROAD, PERSON = 26, 7, 24


def write(folder, split, city, name, ids, image=None):
    for kind, suffix, photo in (
        ("leftImg8bit", "leftImg8bit.png", np.full((*ids.shape, 3), 90, np.uint8) if image is None else image),
        ("gtFine", "gtFine_instanceIds.png", ids.astype(np.uint16)),
    ):
        path = folder / kind / split / city / f"{city}_{name}_{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), photo)


@pytest.fixture
def root(tmp_path):
    ids = np.zeros((40, 60), int)  # 0 is "unlabeled"
    ids[:10] = ROAD
    ids[10:20, :20] = 1000 * CAR
    ids[10:20, 20:30] = 1000 * CAR + 1
    ids[20:30, :30] = PERSON  # a group
    ids[30:, :10] = 1000 * PERSON
    ids[30:, 50:] = 4  # "static", which is not a class
    for split in ("train", "val"):
        write(tmp_path, split, "ulm", "000001_000019", ids)
        write(tmp_path, split, "aachen", "000000_000019", np.where(ids == ROAD, ROAD, 0))
    return tmp_path


def section(name, root, split="val"):
    data = load_config(name)["data"]
    return build_dataset({**data[split], "transforms": None}, str(root))


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_segments_equal_those_of_the_official_script(root):
    dataset = section("mask2former_r50_cityscapes_panoptic", root)
    assert len(dataset) == 2 and dataset.image_ids.tolist() == [0, 1]  # aachen, ulm
    assert len(dataset.classes) == 19 and sum(dataset.things) == 8
    ids, segments = dataset.load_panoptic(1)
    found = {s["id"]: (dataset.classes[s["label"]], s["iscrowd"]) for s in segments}
    assert found == {
        ROAD: ("road", False),
        1000 * CAR: ("car", False),
        1000 * CAR + 1: ("car", False),
        PERSON: ("person", True),
        1000 * PERSON: ("person", False),
    }
    assert ids.dtype == np.int32 and set(np.unique(ids)) == {0, *found}
    assert dataset.image_size(1) == (40, 60) and dataset.aspect_ratios().tolist() == [1.5, 1.5]


def test_samples_have_a_mask_for_each_segment_except_crowds(root):
    dataset = section("mask2former_r50_cityscapes_panoptic", root)
    target = dataset[1]["target"]
    labels = [dataset.classes[label] for label in target["labels"].tolist()]
    assert sorted(labels) == ["car", "car", "person", "road"] and target["masks"].shape == (4, 40, 60)
    assert dataset.load_semantic(1)[25, 5] == dataset.classes.index("person")  # crowds count in semantic maps
    assert dataset.load_semantic(1)[35, 30] == 255


def test_instances_contain_only_things(root):
    dataset = section("mask2former_r50_cityscapes_instance", root)
    assert len(dataset.classes) == 8 and dataset.category_ids == [24, 25, 26, 27, 28, 31, 32, 33]
    assert sorted(dataset.classes[label] for label in dataset[1]["target"]["labels"].tolist()) == [
        "car",
        "car",
        "person",
    ]
    assert len(dataset[0]["target"]["labels"]) == 0
    annotations = dataset.ground_truth()["annotations"]
    assert [(a["image_id"], a["category_id"], a["iscrowd"]) for a in annotations] == [
        (1, PERSON, 1),
        (1, PERSON, 0),
        (1, CAR, 0),
        (1, CAR, 0),
    ]


def test_training_crops_have_one_size(root):
    data = load_config("mask2former_r50_cityscapes_panoptic")["data"]
    sample = build_dataset(data["train"], str(root))[1, 0]
    assert sample["image"].shape == (3, 512, 1024) and sample["target"]["masks"].shape[1:] == (512, 1024)


def test_an_image_of_another_size_is_an_error(root):
    write(root, "val", "aachen", "000000_000019", np.full((40, 60), ROAD), image=np.zeros((40, 50, 3), np.uint8))
    with pytest.raises(DataError, match=r"has 50x40 pixels .* and its annotation .* 60x40"):
        section("mask2former_r50_cityscapes_panoptic", root)[0]


def test_things_that_are_not_classes_are_an_error(root):
    data = load_config("mask2former_r50_cityscapes_panoptic")["data"]
    with pytest.raises(ConfigError, match="not 'lorry'"):
        build_dataset({**data["val"], "things": ["car", "lorry"]}, str(root))
