"""A pretraining run's folder as the start of other models."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import vitkit
from vitkit import CheckpointError
from vitkit.engine.build import load_initial_weights
from vitkit.engine.checkpointing import Progress, RunCheckpoints
from vitkit.models.pretraining import PretrainingModel
from vitkit.registry import BACKBONES
from vitkit.weights import find_weights, load_pretrained, save_checkpoint
from vitkit.weights.loading import InitialWeights
from vitkit.weights.pretrained import pretraining_run, trained_backbone_spec

RESNET = dict(type="ResNet", depth=18, base_channels=8, norm="bn")
VIT = dict(type="ViT", patch_size=8, d_model=32, depth=2, num_heads=2, image_size=32)
DETECTOR = vitkit.load_config("quickstart/detr")["model"]


class Student(PretrainingModel):
    """A model with a head that other models have no use for, and whose trained backbone is its teacher's."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.teacher = BACKBONES.build(backbone)
        self.head = nn.Linear(3, 3)

    @property
    def trained_backbone(self):
        return self.teacher


def pretrain(folder: Path, spec=RESNET, *, seed=0, model=Student) -> nn.Module:
    torch.manual_seed(seed)
    model = model(spec)
    saved_with = {"config": json.dumps({"model": {"type": "Student", "backbone": spec}})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    folder.mkdir(exist_ok=True)
    checkpoints = RunCheckpoints(folder, parts, meters={}, saved_with=saved_with, keep=0, device=torch.device("cpu"))
    assert checkpoints.save(Progress()) == {"backbone.pth", "last.pth"}
    (folder / "config.json").write_text(saved_with["config"])
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[key]) for key, value in a.state_dict().items())


def test_every_save_writes_the_trained_backbone_under_its_own_names(tmp_path):
    model = pretrain(tmp_path / "run")
    state = vitkit.weights.read_checkpoint(tmp_path / "run" / "backbone.pth")
    assert state["model"].keys() == model.teacher.state_dict().keys() and state["progress"]["step"] == 0
    assert trained_backbone_spec(tmp_path / "run") == RESNET and "classes" not in state
    (tmp_path / "other").mkdir()
    assert trained_backbone_spec(tmp_path / "other") is None


@pytest.mark.parametrize("spec", [RESNET, VIT], ids=lambda spec: spec["type"])
def test_a_backbone_and_a_detector_start_from_the_folder(tmp_path, spec):
    run = tmp_path / "run"
    model = pretrain(run, spec)
    backbone = BACKBONES.build(spec, pretrained=str(run))
    assert load_pretrained(backbone) == str(run)
    assert same(backbone, model.teacher)


def test_a_detector_starts_from_the_folder_by_either_way(tmp_path, caplog):
    run, spec = tmp_path / "run", dict(DETECTOR["backbone"], pretrained=False)
    trained = pretrain(run, {name: value for name, value in spec.items() if name != "out_features"}).teacher
    named = vitkit.build_model(dict(DETECTOR, backbone=dict(spec, pretrained=str(run)), num_classes=2))
    load_initial_weights(named, DETECTOR, None, None)
    assert same(named.backbone, trained)
    given = vitkit.build_model(dict(DETECTOR, backbone=spec, num_classes=2))
    with caplog.at_level("INFO", "vitkit"):
        load_initial_weights(given, DETECTOR, InitialWeights(find_weights(run / "last.pth")), ["a", "b"])
    assert same(given.backbone, trained) and "only the newest backbone (backbone.pth)" in caplog.text


def test_other_weights_beside_a_trained_backbone_are_loaded_themselves(tmp_path, monkeypatch):
    spec = dict(DETECTOR["backbone"], pretrained=False)
    pretrain(tmp_path, spec)
    other, given = (vitkit.build_model(dict(DETECTOR, backbone=spec, num_classes=2)) for _ in range(2))
    config = json.dumps({"model": dict(DETECTOR, backbone=spec)})
    for name in ("best.pth", "detector.pth"):
        save_checkpoint(tmp_path / name, {"model": other.state_dict(), "config": config, "classes": ["a", "b"]})
        torch.nn.init.zeros_(given.backbone.conv1.weight)
        load_initial_weights(given, DETECTOR, InitialWeights(find_weights(tmp_path / name)), ["a", "b"])
        assert same(given, other)
    monkeypatch.chdir(tmp_path)
    assert pretraining_run("detr_r50") is None and pretraining_run("last.pth") == Path()


@pytest.mark.parametrize(
    "ours", [dict(RESNET, depth=50), dict(RESNET, base_channels=16), VIT], ids=["deeper", "wider", "vit"]
)
def test_another_backbone_than_the_trained_one_is_named_with_it(tmp_path, ours):
    pretrain(tmp_path / "run")
    with pytest.raises(CheckpointError) as error:
        load_pretrained(BACKBONES.build(ours, pretrained=str(tmp_path / "run")))
    text = str(error.value)
    assert "has trained a backbone ResNet(depth=18, base_channels=8, norm='bn'), whose weights do not fit" in text
    assert f"this model's {ours['type']} with " in text and "Set model.backbone to the one" in text


def test_a_checkpoint_of_the_whole_model_is_an_error_that_names_the_folder(tmp_path):
    pretrain(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"last\.pth has all of a model.*Give the folder of its run, '.*run'"):
        load_pretrained(BACKBONES.build(RESNET, pretrained=str(tmp_path / "run" / "last.pth")))


def test_a_folder_without_a_backbone_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"not the folder of a pretraining run: expected backbone\.pth"):
        load_pretrained(BACKBONES.build(RESNET, pretrained=str(tmp_path)))
