"""What a config writes is what the constructors of datasets, transforms, evaluators and hooks take."""

import dataclasses
import inspect
import json

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.inference.load import read_sampling
from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.registry import DATASETS, EVALUATORS, HOOKS, TRANSFORMS

WORLD = dict(image_size=48, max_image_size=64, min_objects=1, max_objects=1, min_size=0.4, max_size=0.5, seed=3)
SHAPES = {
    "ShapesDetection": dict(num_images=3, masks=True),
    "ShapesSegmentation": dict(num_images=3, task="semantic"),
    "ShapesClassification": dict(num_images=3),
    "ShapesCaptions": dict(num_images=3),
    "ShapesMotion": dict(num_videos=3, directions=["up", "down"], num_frames=3),
}
SAMPLING = dict(
    num_frames=2, sampling_rate=3, frame_rate=25.0, temporal_jitter=True, num_clips=2, on_short="raise"
)  # fmt: skip


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Arguments of the datasets of videos: one class, two folders of eight frames."""
    root = tmp_path_factory.mktemp("videos")
    for name in ("1", "2"):
        (root / "run" / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(np.full((16, 16, 3), 20 * number, np.uint8)).save(root / "run" / name / f"{number}.png")
    (root / "list.txt").write_text("run/1 0\nrun/2 0\n")
    (root / "videos.json").write_text(json.dumps([{"id": name, "template": "run"} for name in ("1", "2")]))
    (root / "labels.json").write_text(json.dumps({"run": "0"}))
    return {
        "VideoFolder": dict(folder=str(root)),
        "VideoList": dict(list_file=str(root / "list.txt"), folder=str(root)),
        "SomethingSomething": dict(
            annotations=str(root / "videos.json"), labels=str(root / "labels.json"), folder=str(root / "run")
        ),
    }


@pytest.mark.parametrize("registry", [DATASETS, TRANSFORMS, EVALUATORS, HOOKS], ids=lambda registry: registry.kind)
def test_no_argument_is_a_dataclass(registry):
    for name in registry.names():
        parameters = inspect.signature(registry.resolve(name)[0]).parameters.values()
        assert not [p.name for p in parameters if dataclasses.is_dataclass(p.default)], name


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    else:
        assert np.array_equal(np.asarray(a), np.asarray(b))


def assert_same_sample(a, b):
    assert len(a) == len(b) and list(a.image_ids) == list(b.image_ids)
    first, second = (dataset.load_sample(0, seed=5) for dataset in (a, b))
    assert_equal(first["image"], second["image"])
    assert_equal(first["target"], second["target"])


@pytest.mark.parametrize("name", SHAPES)
def test_synthetic_datasets_take_the_words_of_a_config(name):
    words = SHAPES[name] | WORLD | dict(split="val")
    from_config = DATASETS.build(dict(type=name, **words))
    from_python = DATASETS.resolve(name)[0](**words)
    assert from_python.world == from_config.world
    assert dataclasses.asdict(from_python.world) == WORLD | dict(split="val", pairs=None)
    assert_same_sample(from_python, from_config)


@pytest.mark.parametrize("name", ["VideoFolder", "VideoList", "SomethingSomething"])
def test_video_datasets_take_the_words_of_a_config(videos, name):
    words = videos[name] | SAMPLING
    from_config = DATASETS.build(dict(type=name, **words))
    from_python = DATASETS.resolve(name)[0](**words)
    assert from_python.sampling == from_config.sampling == ClipSampling(**SAMPLING)
    assert_same_sample(from_python, from_config)


def test_arguments_that_are_left_out_are_those_of_the_dataset(videos):
    assert DATASETS.build(dict(type="VideoFolder", **videos["VideoFolder"])).sampling == ClipSampling()
    something = DATASETS.build(dict(type="SomethingSomething", **videos["SomethingSomething"]))
    assert something.sampling == ClipSampling(sampling_rate=None)
    assert DATASETS.build(dict(type="ShapesClassification", num_images=1)).world.image_size == 64
    assert DATASETS.build(dict(type="ShapesCaptions", num_images=1)).world.max_objects == 2


def test_sampling_of_a_dataset_is_read_from_its_spec():
    spec = dict(type="VideoList", num_frames=4, sampling_rate=2, temporal_jitter=True, num_clips=5, on_short="raise")
    assert read_sampling(spec) == ClipSampling(4, 2)
    assert read_sampling(dict(type="SomethingSomething")) == ClipSampling(8, None)
    assert read_sampling(dict(type="ShapesMotion", num_frames=6)) == ClipSampling(6, 1)
    assert read_sampling(dict(type="ShapesDetection")) is None
