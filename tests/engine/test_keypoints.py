"""Keypoints of the training data size the model, weigh the loss, and are kept by the checkpoint."""

import json

import pytest
import torch

from vitkit.apps.inference.trained_classes import keypoints_of
from vitkit.data.datasets.mixed import MixedDataset
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.engine.build import build_criterion, build_model, collect_dataset_metadata
from vitkit.errors import CheckpointError, ConfigError
from vitkit.registry import CRITERIA, MODELS
from vitkit.structures import KeypointInfo


class PointModel(torch.nn.Module):
    def __init__(self, num_classes: int = 80, num_keypoints: int = 17):
        super().__init__()
        self.num_classes, self.num_keypoints = num_classes, num_keypoints


class PointCriterion(torch.nn.Module):
    def __init__(self, keypoint_sigmas: list[float] | None = None):
        super().__init__()
        self.keypoint_sigmas = keypoint_sigmas


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for registry, part in ((MODELS, PointModel), (CRITERIA, PointCriterion)):
        registry.names()  # imports all, which would otherwise be registered for this test alone
        monkeypatch.setattr(registry, "_constructors", {**registry._constructors, part.__name__: part})


def test_dataset_sizes_the_model_and_weighs_the_loss():
    dataset = ShapesDetection(2, keypoints=True)
    spec = dict(type="PointModel", num_classes=80, num_keypoints=17)  # of a published checkpoint
    model = build_model(spec, classes=dataset.classes, keypoints=dataset.keypoints)
    assert (model.num_classes, model.num_keypoints) == (6, 4)
    assert build_model(spec, classes=dataset.classes).num_keypoints == 17
    criterion = build_criterion(dict(type="PointCriterion"), dataset.classes, dataset)
    assert criterion.keypoint_sigmas == [0.05] * 4
    own = build_criterion(dict(type="PointCriterion", keypoint_sigmas=[0.1] * 4), dataset.classes, dataset)
    assert own.keypoint_sigmas == [0.1] * 4


def test_checkpoint_keeps_keypoints():
    dataset = ShapesDetection(2, keypoints=True)
    stored = json.loads(json.dumps(collect_dataset_metadata(dataset, {})))
    assert keypoints_of(stored, "run.pth") == dataset.keypoints
    assert keypoints_of(collect_dataset_metadata(ShapesDetection(2), {}), "run.pth") is None
    stored["keypoints"]["sigmas"].pop()
    with pytest.raises(CheckpointError, match="run.pth: damaged: its keypoints .*got 3 sigmas .*expected 4"):
        keypoints_of(stored, "run.pth")


def test_mixed_datasets_have_one_order(monkeypatch):
    spec = dict(type="ShapesDetection", num_images=2, keypoints=True)
    assert MixedDataset(datasets=[spec, spec]).keypoints == ShapesDetection(2, keypoints=True).keypoints
    with pytest.raises(ConfigError, match="have the keypoints top, right, bottom, left and none. Load the same in all"):
        MixedDataset(datasets=[spec, {**spec, "keypoints": False}])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(flip_pairs=((0, 1), (1, 2))), "flip_pairs has 'b' twice"),
        (dict(flip_pairs=((0, 0),)), "two different of the 3 keypoints"),
        (dict(skeleton=((0, 3),)), r"skeleton has \[0, 3\]"),
        (dict(sigmas=(0.1, 0.1, 0.0)), "expected 3 numbers above 0"),
    ],
)
def test_wrong_keypoints_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KeypointInfo(**{"names": ("a", "b", "c"), "sigmas": (0.1,) * 3, **fields})
