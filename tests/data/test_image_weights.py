"""How often images are repeated: factors by hand, and epochs that follow them on all ranks."""

from collections import Counter

import numpy as np
import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.data.loading.image_weights import class_aware_weights, draw, image_weights, repeat_factors
from vitkit.data.loading.samplers import TrainBatches
from vitkit.data.loading.settings import DataSettings
from vitkit.errors import ConfigError

# Class 0 is in all four images, class 1 in one.
IMAGES, LABELS = np.array([0, 1, 2, 3, 3]), np.array([0, 0, 0, 0, 1])


def test_images_are_repeated_by_their_rarest_class():
    assert repeat_factors(IMAGES, LABELS, 4, threshold=1.0).tolist() == [1, 1, 1, 2]
    assert repeat_factors(IMAGES, LABELS, 4, threshold=0.25).tolist() == [1, 1, 1, 1]
    # An image without objects, and a class of an unknown image count for nothing.
    assert repeat_factors(IMAGES, LABELS, 8, threshold=1.0).tolist() == pytest.approx([2**0.5] * 3 + [8**0.5] + [1] * 4)


def test_classes_are_sampled_equally_often():
    weights = class_aware_weights(IMAGES, LABELS, 4)
    assert weights.tolist() == [0.5, 0.5, 0.5, 2.5]
    # Half of the draws are for class 1, whose only image is the last; it is also a quarter of the other draws.
    assert class_aware_weights(IMAGES[:4], LABELS[:4], 5).tolist() == [1.25, 1.25, 1.25, 1.25, 0]


def test_draw_has_the_given_size_and_follows_the_weights():
    random, weights = np.random.default_rng(0), np.array([0.5, 1.0, 2.5, 0.0])
    counts = np.zeros(4)
    for _ in range(400):
        drawn = np.bincount(draw(np.arange(4), weights, 4, random), minlength=4)
        assert drawn.sum() == 4 and (np.abs(drawn - weights) < 1).all()
        counts += drawn
    np.testing.assert_allclose(counts / 400, weights, atol=0.08)


def batches_of(**arguments):
    groups, weights = np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([1, 1, 1, 5, 0, 0, 2.0, 1])
    return TrainBatches(8, batch_size=2, seed=0, groups=groups, weights=weights, **arguments)


def test_every_epoch_has_equally_many_batches_and_a_new_draw_and_can_resume():
    sampler = batches_of()
    counts = Counter()
    for epoch in range(50):
        sampler.set_position(epoch)
        epoch_batches = list(sampler)
        assert len(epoch_batches) == len(sampler) == 6  # 8 and 3 images, in pairs
        entries = [entry for batch in epoch_batches for entry in batch]
        assert len(set(entries)) == len(entries)
        counts.update(index for index, _ in entries)
        sampler.set_position(epoch, 4)
        assert list(sampler) == epoch_batches[4:]
    assert not counts.keys() & {4, 5} and counts[3] > 4 * counts[0] and counts[6] > 1.5 * counts[7]


def test_ranks_share_the_draw():
    alone = batches_of()
    ranks = [list(batches_of(rank=rank, world_size=2)) for rank in (0, 1)]
    assert [ranks[number % 2][number // 2] for number in range(6)] == list(alone)


def test_group_of_images_with_zero_weight_has_no_batches():
    sampler = TrainBatches(4, batch_size=2, seed=0, groups=np.array([0, 0, 1, 1]), weights=np.array([1.0, 1, 0, 0]))
    assert len(sampler) == 1 and {index for index, _ in next(iter(sampler))} == {0, 1}


def test_settings_of_samplers_are_checked():
    with pytest.raises(ConfigError, match=r"data.repeat_threshold: got 0; expected above 0"):
        DataSettings(repeat_threshold=0)
    with pytest.raises(ConfigError, match=r"data.sampler=class_aware: PlainDataset does not list the classes"):
        DataSettings(sampler="class_aware").train_loader(PlainDataset(image_ids=[1, 2]), seed=0)


def test_only_images_that_are_trained_on_are_weighed(monkeypatch):
    monkeypatch.setattr(PlainDataset, "image_classes", lambda self: (IMAGES, LABELS))
    monkeypatch.setattr(PlainDataset, "training_indices", lambda self: np.array([1, 3]))
    dataset = PlainDataset(image_ids=[1, 2, 3, 4])
    # Of two images, both have class 0 and one has class 1.
    assert image_weights(dataset, "class_aware", repeat_threshold=1.0).tolist() == [0, 0.5, 0, 1.5]
    assert image_weights(dataset, "repeat_factor", repeat_threshold=1.0).tolist() == [0, 1, 0, 2**0.5]
    monkeypatch.setattr(PlainDataset, "image_classes", lambda self: (IMAGES[:1], LABELS[:1]))
    with pytest.raises(ConfigError, match="data.sampler=class_aware: no training image has an object"):
        DataSettings(sampler="class_aware").train_loader(dataset, seed=0)


def test_images_without_objects_are_not_sampled_by_class(monkeypatch):
    no_classes = np.zeros(0, np.int64), np.zeros(0, np.int64)
    monkeypatch.setattr(PlainDataset, "image_classes", lambda self: no_classes)
    dataset = PlainDataset(image_ids=[1, 2])
    with pytest.raises(ConfigError, match="data.sampler=class_aware: no training image has an object"):
        DataSettings(sampler="class_aware").train_loader(dataset, seed=0)
    assert len(DataSettings(sampler="repeat_factor", images_per_gpu=1).train_loader(dataset, seed=0)) == 2


def test_coco_dataset_returns_the_classes_of_its_images(shared_data):
    from vitkit.data.datasets.coco import CocoDetection

    root = shared_data / "coco_tiny"
    dataset = CocoDetection(str(root / "train2017"), str(root / "annotations" / "instances_train2017.json"))
    images, labels = dataset.image_classes()
    expected = {(i, label) for i in range(len(dataset)) for label in dataset[i]["target"]["labels"].tolist()}
    assert len(images) == len(expected) and set(zip(images.tolist(), labels.tolist())) == expected
    settings = DataSettings(sampler="repeat_factor", repeat_threshold=0.5, num_workers=0, images_per_gpu=4)
    loader = settings.train_loader(dataset, seed=0)
    assert len(loader) > len(DataSettings(num_workers=0, images_per_gpu=4).train_loader(dataset, seed=0))
