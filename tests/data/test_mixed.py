import numpy as np
import pytest
from helpers.located_texts import detection_line, grounding_line, write_images, write_odvg

from vitkit.data.loading.samplers import TrainBatches
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import build_dataset
from vitkit.errors import ConfigError


@pytest.fixture
def spec(tmp_path):
    images = write_images(tmp_path / "images", "a.jpg", "b.jpg")
    pets = write_odvg(tmp_path / "pets.jsonl", *[detection_line()] * 4)
    bird = dict(bbox=[1, 2, 9, 9], label=0, category="bird")
    dog = dict(bbox=[1, 2, 9, 9], label=1, category="dog")
    birds = write_odvg(tmp_path / "birds.jsonl", *[detection_line("b.jpg", [bird, dog])] * 10)
    captions = write_odvg(tmp_path / "captions.jsonl", *[grounding_line()] * 2)
    datasets = [dict(type="GroundingDataset", images=str(images), annotations=str(p)) for p in (pets, birds, captions)]
    return dict(type="MixedDataset", datasets=datasets)


def test_classes_of_one_name_are_one_and_prompts_have_only_those_of_the_images_dataset(spec):
    dataset = build_dataset(spec)
    assert (len(dataset), dataset.classes) == (16, ["dog", "cat", "bird"])
    pets, birds, caption = (dataset[k]["target"] for k in (3, 4, 15))
    assert [dataset.classes[k] for k in pets["labels"]] == ["cat", "dog"]
    assert [dataset.classes[k] for k in pets["negative_labels"]] == ["dog", "cat"]
    assert [dataset.classes[k] for k in birds["labels"]] == ["bird", "dog"]
    assert [dataset.classes[k] for k in birds["negative_labels"]] == ["bird", "dog"]
    assert "phrases" in caption and "negative_labels" not in caption
    assert [target["image_id"] for target in (pets, birds, caption)] == [4, 5, 16]
    images, labels = dataset.image_classes()
    assert np.bincount(images).tolist() == [2] * 14 and np.bincount(labels).tolist() == [14, 4, 10]
    assert dataset.image_path(4).name == "b.jpg" and dataset.image_size(4) == (32, 40)
    assert len(list(dataset.phrases())) == 4


def test_images_occur_as_often_as_their_dataset_weighs_and_others_in_every_epoch(spec):
    dataset = build_dataset({**spec, "weights": [2, 0.3, 1]})
    loader = DataSettings(images_per_gpu=1, num_workers=0, aspect_ratio_grouping=False).train_loader(dataset, seed=0)
    epochs = []
    for epoch in range(40):
        loader.set_position(epoch)
        counts = np.bincount([index for ((index, _),) in loader.batches], minlength=16)
        assert counts[:4].tolist() == [2] * 4 and counts[4:14].sum() == 3 and counts[14:].tolist() == [1, 1]
        epochs.append(counts)
    assert len(epochs[0]) == 16 and (np.sum(epochs, axis=0) > 0).all() and len({tuple(c) for c in epochs}) > 5


def test_an_epoch_resumes_with_the_same_images(spec):
    dataset = build_dataset({**spec, "weights": [2, 0.3, 1]})
    batches = TrainBatches(len(dataset), batch_size=2, seed=1, weights=dataset.sample_weights())
    batches.set_position(3)
    whole = list(batches)
    batches.set_position(3, 2)
    assert list(batches) == whole[2:]


def test_repeat_factors_and_weights_multiply(spec):
    dataset = build_dataset({**spec, "weights": [1, 0.5, 1]})
    settings = DataSettings(images_per_gpu=1, num_workers=0, sampler="repeat_factor", repeat_threshold=1.0)
    loader = settings.train_loader(dataset, seed=0)
    rare = np.sqrt(16 / 4), np.sqrt(16 / 10)  # cats and birds
    assert loader.batches.weights == pytest.approx([rare[0]] * 4 + [0.5 * rare[1]] * 10 + [1, 1])


def test_root_is_put_into_the_specs_of_each_dataset(spec, tmp_path):
    datasets = [
        {name: value.replace(str(tmp_path), "{root}") for name, value in part.items()} for part in spec["datasets"]
    ]
    assert "{root}" in datasets[0]["images"]
    assert len(build_dataset({**spec, "datasets": datasets}, str(tmp_path))) == 16


def test_settings_of_files_reach_each_dataset(spec):
    dataset = build_dataset(spec, max_image_pixels=1234)
    assert {part.max_image_pixels for part in dataset.datasets} == {1234}


@pytest.mark.parametrize(
    "changes", [dict(weights=[1]), dict(weights=[1, 0, 1]), dict(datasets=[]), dict(weights=[1, 1, float("nan")])]
)
def test_wrong_weights_are_errors(spec, changes):
    with pytest.raises(ConfigError, match="expected at least one dataset, and a positive weight for each"):
        build_dataset(spec | changes)
