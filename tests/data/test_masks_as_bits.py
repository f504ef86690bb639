"""Masks of targets from a dataset to its batches, as bits."""

import numpy as np
import pytest
import torch

from vitkit.data.loading.batch_augmentation import BatchAugmentation
from vitkit.data.loading.settings import DataSettings
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.ops.packed_masks import PackedMasks


@pytest.fixture(scope="module")
def dataset():
    return ShapesDetection(4, masks=True, min_objects=2, image_size=45)


def test_masks_of_a_dataset_are_those_of_its_images(dataset):
    for index in range(len(dataset)):
        masks = dataset[index]["target"]["masks"]
        expected = dataset.load_annotated(index).masks
        visible = expected.any((1, 2))
        assert type(masks) is PackedMasks and np.array_equal(masks.numpy(), expected[visible].astype(bool))


def test_workers_send_them_packed(dataset):
    alone, helped = (list(DataSettings(num_workers=n, val_images_per_gpu=2).val_loader(dataset)) for n in (0, 1))
    for a, b in zip(alone, helped, strict=True):
        for target, sent in zip(a.targets, b.targets, strict=True):
            assert type(sent["masks"]) is PackedMasks and torch.equal(sent["masks"], target["masks"])


@pytest.mark.parametrize("others", [dict(mixup=None), dict(mixup=dict(probability=1.0))], ids=["blended", "mixed"])
def test_augmented_batches_are_the_same_and_stay_packed(dataset, others):
    samples = [dataset[index, 7] for index in range(len(dataset))]
    decoded = [s | dict(target=s["target"] | dict(masks=s["target"]["masks"].clone())) for s in samples]
    blend = dict(probability=1.0, min_area=9.0)
    augment = BatchAugmentation(dict(sizes=[67], min_box_side=8.0), copy_blend=blend, seed=3, **others)
    for got, expected, before in zip(augment(samples, 0, 0), augment(decoded, 0, 0), samples, strict=True):
        assert torch.equal(got["image"], expected["image"]) and type(got["target"]["masks"]) is PackedMasks
        assert got["target"]["masks"].shape == (len(got["target"]["labels"]), 67, 67)
        assert len(got["target"]["masks"]) > len(before["target"]["masks"])
        assert all(torch.equal(got["target"][name], expected["target"][name]) for name in ("masks", "labels"))
