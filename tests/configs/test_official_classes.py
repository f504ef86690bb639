"""A config knows how many classes its published checkpoint has, without data; test_mask_configs covers mask models."""

import pytest
import torch

from vitkit import build_model, load_config
from vitkit.config import config_names

NUM_CLASSES = {"detr": 91, "deformable": 91, "in1k": 1000, "k400": 400}
"""First or last part of a config's name -> published number of classes."""


def num_classes_of(name):
    parts = name.split("_")
    if parts[0] in ("dino", "distil", "mae"):  # learns without labels, or has no published classifier
        return None
    return None if "/" in name or "panoptic" in parts else NUM_CLASSES.get(parts[0]) or NUM_CLASSES.get(parts[-1])


OFFICIAL = [name for name in config_names() if num_classes_of(name)]


@pytest.mark.parametrize("name", OFFICIAL)
def test_model_built_without_data_has_the_classes_of_its_published_checkpoint(name):
    with torch.device("meta"):
        model = build_model(load_config(name)["model"])
    state = model.state_dict()
    heads = [key for key in state if key.startswith(tuple(model.class_head)) and key.endswith("weight")]
    no_object = 1 if name.startswith("detr") else 0
    assert {len(state[key]) for key in heads} == {num_classes_of(name) + no_object}


def test_every_family_is_covered():
    assert {name.split("_")[0] for name in OFFICIAL} == {
        *("deit", "detr", "deformable", "lrnet50", "mvitv1", "mvitv2", "nonlocal", "resnet50", "swin", "swinv2"),
        *("timesformer", "vit"),
    }


def test_classes_of_the_data_determine_the_model_size():
    spec = load_config("mask2former_r50_ade20k_panoptic")["model"]
    spec["backbone"] = dict(type="ResNet", depth=18, pretrained=False)
    with torch.device("meta"):
        model = build_model(spec, classes=["cat", "dog", "sky"], things=[True, True, False])
        assert len(model.head.class_embed.weight) == 4 and model.things == [True, True, False]
        assert build_model(spec, classes=["cat", "dog"]).things == [True, True]
