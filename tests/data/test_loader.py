"""The order of samples, ranks, resuming, workers and their errors."""

from collections import Counter

import numpy as np
import pytest
import torch

from vitkit.data.loader import (
    DataSettings,
    EvalBatches,
    TrainBatches,
    build_dataset,
    build_loader,
    check_same_classes,
)
from vitkit.errors import ConfigError, DataError
from vitkit.registry import SECTIONS


class Numbers:
    """A dataset whose samples tell which index and seed they were asked for."""

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


def batches_of(size, **arguments):
    return TrainBatches(size, **{"batch_size": 2, "seed": 0, **arguments})


def seen(loader):
    return [[(target["image_id"], target["seed"]) for target in batch.targets] for batch in loader]


def test_every_image_comes_each_epoch_in_another_order():
    sampler = batches_of(10)
    first = list(sampler)
    assert sorted(index for batch in first for index, _ in batch) == list(range(10))
    sampler.set_position(1)
    second = list(sampler)
    assert [i for batch in first for i, _ in batch] != [i for batch in second for i, _ in batch]
    assert not {s for batch in first for _, s in batch} & {s for batch in second for _, s in batch}


def test_the_seed_of_the_run_decides_the_order():
    assert list(batches_of(10)) == list(batches_of(10))
    assert list(batches_of(10)) != list(batches_of(10, seed=1))


@pytest.mark.parametrize("size", [1, 3, 8, 13, 50])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_the_images_and_have_as_many_batches(size, world_size):
    groups = (np.arange(size) % 3 == 0).astype(int)
    ranks = [batches_of(size, groups=groups, rank=rank, world_size=world_size) for rank in range(world_size)]
    taken = [list(sampler) for sampler in ranks]
    assert {len(batches) for batches in taken} == {len(ranks[0])}
    entries = [entry for batches in taken for batch in batches for entry in batch]
    assert {index for index, _ in entries} == set(range(size))
    assert len(set(entries)) == len(entries)  # an image that comes again does so with another seed
    assert len(entries) - size <= 2 * world_size + 2
    assert all(len({groups[index] for index, _ in batch}) == 1 for batches in taken for batch in batches)


def test_resuming_in_an_epoch_gives_the_same_samples():
    whole = batches_of(11, batch_size=3)
    whole.set_position(4)
    expected = list(whole)
    resumed = batches_of(11, batch_size=3)
    resumed.set_position(4, 2)
    assert list(resumed) == expected[2:] and len(resumed) == len(expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_takes_each_image_once(world_size):
    counts = Counter()
    for rank in range(world_size):
        sampler = EvalBatches(7, batch_size=2, rank=rank, world_size=world_size)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        counts.update(index for batch in batches for index, _ in batch)
    assert counts == Counter(range(7))


@pytest.mark.parametrize("training", [True, False])
def test_workers_give_what_no_workers_give(training):
    arguments = {"batch_size": 2, "training": training, "seed": 3}
    alone = build_loader(Numbers(), num_workers=0, **arguments)
    helped = build_loader(Numbers(), num_workers=2, **arguments)
    for epoch in range(2):
        if training:
            alone.set_position(epoch)
            helped.set_position(epoch)
        assert seen(alone) == seen(helped)
    assert len(alone) == len(helped)


def test_loader_resumes_without_loading_what_it_skips():
    loader = build_loader(Numbers(), batch_size=2, training=True)
    loader.set_position(2)
    expected = seen(loader)
    fresh = build_loader(Numbers(), batch_size=2, training=True)
    fresh.set_position(2, 3)
    assert seen(fresh) == expected[3:]


def test_loading_leaves_the_global_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    loader = build_loader(Numbers(), batch_size=2, training=True, num_workers=1)
    iter(loader).__next__()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_arrives_as_it_was_raised(num_workers):
    loader = build_loader(Numbers(bad=4), batch_size=1, training=False, num_workers=num_workers)
    with pytest.raises(DataError) as caught:
        list(loader)
    assert str(caught.value) == "images: cannot read '4.jpg'"


def test_grouping_can_be_switched_off():
    loader = build_loader(Numbers(), batch_size=11, training=True, aspect_ratio_grouping=False)
    assert len(loader) == 1
    assert len(build_loader(Numbers(), batch_size=11, training=True)) == 2


def test_settings_are_checked():
    settings = SECTIONS.build({"type": "data", "images_per_gpu": 4})
    assert isinstance(settings, DataSettings) and settings.val_images_per_gpu == 1
    with pytest.raises(ConfigError, match=r"data\.num_workers: got -1; expected at least 0"):
        DataSettings(num_workers=-1)


def test_train_and_val_need_the_same_classes():
    def dataset(ids, names):
        return type("Classes", (), {"category_ids": ids, "classes": names})

    check_same_classes(dataset([1, 3], ["a", "b"]), dataset([1, 3], ["a", "b"]))
    with pytest.raises(DataError, match="differ at id 3: 'b' and 'c'"):
        check_same_classes(dataset([1, 3], ["a", "b"]), dataset([1, 3], ["a", "c"]))


def test_an_epoch_over_coco_tiny_in_workers(shared_data):
    spec = {
        "type": "CocoDetection",
        "images": "{root}/train2017",
        "annotations": "{root}/annotations/instances_train2017.json",
        "transforms": {"type": "DETRTrainTransforms", "scales": [96, 128], "max_size": 200, "crop_range": (64, 100),
                       "crop_scales": [100]},
    }  # fmt: skip
    dataset = build_dataset(spec, str(shared_data / "coco_tiny"))
    loader = build_loader(dataset, batch_size=4, training=True, num_workers=2)
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
