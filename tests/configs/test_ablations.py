"""The sets of runs in configs/ablations: every arm is a valid config, and image models train a step on tiny images."""

import functools
import json

import pytest
import torch

from vitkit.apps.starter.ablations.sets import read_set, set_files, summary_of, train_command
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.models.classifier import Classifier
from vitkit.nn.additive_attention import SCORES
from vitkit.registry import CRITERIA, DATASETS, TRANSFORMS
from vitkit.text.vocabulary import Vocabulary

SETS = {path.stem: read_set(path) for path in set_files()}
ARMS = [(name, arm) for name, ablation in SETS.items() for arm in ablation.arms]
SIDE = 96


def tiny_target():
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.bool)
    masks[0, : SIDE // 2], masks[1, SIDE // 2 :] = True, True
    return {
        "label": 1,
        "labels": torch.tensor([0, 1]),
        "boxes_cxcywh": torch.tensor([[0.5, 0.25, 1.0, 0.5], [0.5, 0.75, 1.0, 0.5]]),
        "masks": masks,
        "semantic": masks[1].long(),
        "image_size": (SIDE, SIDE),
        "original_size": (SIDE, SIDE),
    }


@pytest.mark.parametrize(("name", "arm"), ARMS, ids=[f"{name}: {arm}" for name, arm in ARMS])
def test_arm_is_a_valid_config_that_trains_a_step(name, arm):
    _, _, base, *overrides = train_command(SETS[name], arm, [])
    config = load_config(base, overrides)
    assert config["data"]["num_workers"] == 0, "loading processes' time would not be counted"
    if "backbone" not in config["model"]:
        return  # text models, which tests/configs/test_text_configs.py and others train
    backbone = config["model"]["backbone"]
    if backbone["type"] == "ResNet" and backbone["depth"] == 50:
        backbone.update(depth=18, stride_in_1x1=False)
    if "pretrained" in backbone:
        backbone["pretrained"] = False
    if "num_queries" in config["model"]:  # an image of 96 pixels has 36 locations at stride 16
        config["model"]["num_queries"] = min(30, config["model"]["num_queries"])
    has_prompts = config["data"].get("prompts") is not None
    train_a_step(json.dumps(config["model"]), json.dumps(config["criterion"]), has_prompts)


@functools.cache  # arms may differ in their data only
def train_a_step(model_spec, criterion_spec, has_prompts):
    vocabularies = {"target": Vocabulary.train("word", ["a b c ."])} if has_prompts else None
    model = build_model(json.loads(model_spec), classes=["a", "b", "c"], vocabularies=vocabularies)
    criterion = CRITERIA.build(json.loads(criterion_spec))
    model.train()
    targets = [tiny_target(), tiny_target()]
    if isinstance(model, Classifier):
        loss = sum(criterion(model(torch.rand(2, 3, 64, 64)), targets).values())
        assert loss.isfinite()
        return loss.backward()
    inputs = {"targets": targets} if getattr(model, "uses_targets", False) else {}
    if has_prompts:
        inputs["prompt"] = model.tokenize(["a . b . c", "b . c"])
    losses = criterion(
        model(torch.rand(2, 3, SIDE, SIDE), torch.zeros(2, SIDE, SIDE, dtype=torch.bool), **inputs), targets
    )
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert all(p.grad is not None for p in model.head.parameters() if p.requires_grad)


def test_every_alignment_score_is_an_arm():
    assert {*SCORES} <= {*SETS["rnn_parts"].arms}


def test_fixed_matching_has_a_query_for_each_class():
    _, _, base, *overrides = train_command(SETS["maskformer_matching"], "MaskFormer, fixed", [])
    config = load_config(base, overrides)
    assert config["model"]["num_queries"] == len(DATASETS.build(config["data"]["val"]).classes)


@pytest.mark.parametrize(
    ("arm", "width"), [("DINO, ResNet-18", 320), ("D-FINE-N, 640 pixels", 640), ("RF-DETR-N, 384 pixels", 384)]
)
def test_detectors_are_evaluated_at_the_size_that_they_are_trained_for(arm, width):
    _, _, base, *overrides = train_command(SETS["detectors_bccd"], arm, [])
    data = load_config(base, overrides)["data"]
    assert TRANSFORMS.build(data["val"]["transforms"]).size_of(480, 640) == (3 * width // 4, width)
    scales = data["train"]["transforms"]["transforms"][2]["scales"]
    assert min(scales) <= 3 * width // 4 <= max(scales)


@pytest.mark.parametrize("name", SETS)
def test_ablation_set_documents_its_command(name):
    path = next(path for path in set_files() if path.stem == name)
    assert summary_of(path) and f"vitkit ablate {name}" in path.read_text()


def test_curves_have_every_arm_once():
    curves = [ablation for ablation in SETS.values() if ablation.curves]
    assert curves
    for ablation in curves:
        assert sorted(arm for points in ablation.curves.values() for arm in points.values()) == sorted(ablation.arms)
