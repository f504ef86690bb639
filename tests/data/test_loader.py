"""Workers and their errors, resuming, settings."""

import os
import sys

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset

from vitkit.config import load_config
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset, check_same_classes
from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset
from vitkit.registry import SECTIONS


class Numbers(Dataset):
    """A dataset whose samples hold the requested index and seed."""

    def __init__(self, size=11, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        index, seed = index
        if index == self.bad:
            raise DataError(f"images: cannot read '{index}.jpg'")
        image = torch.full((3, 4, 4 + index % 3), index, dtype=torch.uint8)
        return {"image": image, "target": {"image_id": index, "seed": seed, "noise": torch.rand(())}}

    def aspect_ratios(self):
        return np.where(np.arange(self.size) % 3 == 0, 0.7, 1.4)


def seen(loader):
    return [[(target["image_id"], target["seed"]) for target in batch.targets] for batch in loader]


@pytest.mark.parametrize("training", [True, False])
def test_batches_are_the_same_with_and_without_workers(training):
    alone, helped = (
        settings.train_loader(Numbers(), seed=3) if training else settings.val_loader(Numbers())
        for settings in (DataSettings(val_images_per_gpu=2, num_workers=num_workers) for num_workers in (0, 2))
    )
    for epoch in range(2):
        if training:
            alone.set_position(epoch)
            helped.set_position(epoch)
        assert seen(alone) == seen(helped)
    assert len(alone) == len(helped)


def test_loader_resumes_without_loading_skipped_samples():
    loader = DataSettings(images_per_gpu=2, num_workers=0).train_loader(Numbers(), seed=0)
    loader.set_position(2)
    expected = seen(loader)
    fresh = DataSettings(images_per_gpu=2, num_workers=0).train_loader(Numbers(), seed=0)
    fresh.set_position(2, 3)
    assert seen(fresh) == expected[3:]


def test_loading_does_not_change_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    loader = DataSettings(images_per_gpu=2, num_workers=1).train_loader(Numbers(), seed=0)
    iter(loader).__next__()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_error_of_a_worker_is_raised_unchanged(num_workers):
    loader = DataSettings(val_images_per_gpu=1, num_workers=num_workers).val_loader(Numbers(bad=4))
    with pytest.raises(DataError) as caught:
        list(loader)
    assert str(caught.value) == "images: cannot read '4.jpg'"


def test_grouping_can_be_switched_off():
    loader = DataSettings(images_per_gpu=11, num_workers=0, aspect_ratio_grouping=False).train_loader(Numbers(), seed=0)
    assert len(loader) == 1
    assert len(DataSettings(images_per_gpu=11, num_workers=0).train_loader(Numbers(), seed=0)) == 2


def test_settings_are_checked():
    settings = SECTIONS.build({"type": "data", "images_per_gpu": 4})
    assert isinstance(settings, DataSettings) and settings.val_images_per_gpu == 1
    with pytest.raises(ConfigError, match=r"data\.num_workers: got -1; expected at least 0"):
        DataSettings(num_workers=-1)


def test_train_and_val_need_the_same_classes():
    def dataset(ids, names):
        return PlainDataset(category_ids=ids, classes=names)

    check_same_classes(dataset([1, 3], ["a", "b"]), dataset([1, 3], ["a", "b"]))
    with pytest.raises(DataError, match="differ at id 3: 'b' and 'c'"):
        check_same_classes(dataset([1, 3], ["a", "b"]), dataset([1, 3], ["a", "c"]))


def test_classes_without_ids_are_compared_in_their_order():
    def dataset(*names):
        return PlainDataset(classes=list(names))

    check_same_classes(dataset("a", "b"), dataset("a", "b"))
    with pytest.raises(DataError, match="differ at id 0: 'a' and 'b'"):
        check_same_classes(dataset("a", "b"), dataset("b", "a"))
    with pytest.raises(DataError, match="has 2 classes and data.val has 1"):
        check_same_classes(dataset("a", "b"), PlainDataset(classes=["a"], category_ids=[7]))


def test_a_dataset_without_the_base_is_refused():
    for load in (lambda data: data.train_loader([1, 2], seed=0), lambda data: data.val_loader([1, 2])):
        with pytest.raises(ConfigError, match=r"^dataset list does not derive from vitkit\.Dataset, .* Write: class"):
            load(DataSettings())


def test_workers_load_an_epoch_of_coco_tiny(shared_data):
    spec = {
        "type": "CocoDetection",
        "images": "{root}/train2017",
        "annotations": "{root}/annotations/instances_train2017.json",
        "transforms": {
            "type": "DETRTrainTransforms",
            "scales": [96, 128],
            "max_size": 200,
            "crop_range": (64, 100),
            "crop_scales": [100],
        },
    }
    dataset = build_dataset(spec, str(shared_data / "coco_tiny"))
    loader = DataSettings(images_per_gpu=4, num_workers=2).train_loader(dataset, seed=0)
    ids = set()
    for batch in loader:
        images, padding_mask = batch.inputs["images"], batch.inputs["padding_mask"]
        assert images.shape[0] == 4 and images.dtype == torch.uint8
        assert (images * padding_mask[:, None] == 0).all()
        for target, mask in zip(batch.targets, padding_mask):
            height, width = target["image_size"]
            assert (~mask).sum() == height * width
            assert ((target["boxes_cxcywh"] >= 0) & (target["boxes_cxcywh"] <= 1)).all()
            ids.add(target["image_id"])
    assert ids == set(dataset.image_ids.tolist())


def test_all_splits_are_evaluated_with_validation_transforms():
    world = dict(type="ShapesDetection", num_images=4)
    resize = dict(type="EvalResize", short_side=64, max_size=64)
    settings = DataSettings(
        train=dict(**world, fraction=0.5, transforms=dict(type="DETRTrainTransforms")),
        val=dict(**world, split="val", transforms=resize),
        test=dict(**world, split="test"),
    )
    assert settings.evaluation_dataset("train")[0]["image"].shape[-2:] == (64, 64)
    for split in ("train", "test"):
        stored = build_dataset(dict(**world, split=split)).load_image(0)
        assert (settings.evaluation_dataset(split).load_image(0) == stored).all()
    with pytest.raises(ConfigError, match=r"data\.test: the config has none"):
        DataSettings(train=world).evaluation_dataset("test")


def test_automatic_workers_share_the_cores_of_the_machine(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(32), raising=False)
    counts = []
    for ranks in ("1", "4", "32"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        cfg = load_config("quickstart/detr", ["data.num_workers=auto"])
        counts.append(DataSettings(**cfg["data"]).num_workers)
    assert counts == [16, 7, 1] and cfg["data"]["num_workers"] == "auto"
