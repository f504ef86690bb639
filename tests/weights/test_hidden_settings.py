"""Settings that change results but neither names nor shapes of the weights."""

import copy
import json
import logging
from argparse import Namespace

import pytest
import torch
from torch import nn

from vitkit import load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.registry import BACKBONES
from vitkit.weights import load_weights, locate


def dfine(**head):
    spec = load_config("dfine_n_coco")["model"] | dict(num_classes=3, num_queries=5, training_queries=[])
    spec["backbone"] = dict(spec["backbone"], pretrained=False)
    spec["head"] = dict(spec["head"], num_decoder_layers=1, **head)
    return spec


def rf_detr_seg(num_windows):
    spec = load_config("rf_detr_seg_n_coco")["model"] | dict(num_classes=3, num_queries=5, training_queries=[])
    small = dict(d_model=16, depth=2, num_heads=2, global_blocks=[1], out_features=["block1", "block2"])
    spec["backbone"] = dict(spec["backbone"], **small, pretrained=False, num_windows=num_windows)
    spec["head"] = dict(spec["head"], num_decoder_layers=1)
    return spec


def warnings_of(ours, theirs, caplog):
    model = build_model(ours)
    checkpoint = dict(model=build_model(theirs).state_dict(), config=json.dumps(dict(model=theirs)))
    with caplog.at_level(logging.WARNING, "vitkit"):
        caplog.clear()
        load_weights(model, checkpoint, spec=ours)
    return caplog.text


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (dfine(), dfine(activation="silu"), "model.head.activation='silu', this model has 'relu'"),
        (rf_detr_seg(2), rf_detr_seg(1), "model.backbone.num_windows=1, this model has 2"),
    ],
)
def test_weights_of_another_variant_are_warned_of(ours, theirs, expected, caplog):
    text = warnings_of(ours, theirs, caplog)
    assert f"was trained with {expected}. The weights fit, but the results will not be" in text


def test_weights_that_do_not_fit_are_only_an_error(caplog):
    theirs = dfine()
    theirs["head"]["num_decoder_layers"] = 2
    checkpoint = dict(model=build_model(theirs).state_dict(), config=json.dumps(dict(model=theirs)))
    with pytest.raises(CheckpointError, match=r"head\.decoder\.layers\.1"):
        load_weights(build_model(dfine()), checkpoint, spec=dfine())
    assert not caplog.text


def test_a_variants_settings_may_be_given_one_by_one(caplog):
    ours = dict(backbone=dict(type="swin_tiny", out_features=["res2"]))
    swin = dict(type="Swin", depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], out_features=["res2"])
    theirs = dict(backbone=swin)
    model = nn.ModuleDict({"backbone": BACKBONES.build(ours["backbone"])})

    def load():
        checkpoint = dict(model=model.state_dict(), config=json.dumps(dict(model=theirs)))
        load_weights(model, checkpoint, spec=ours)

    load()
    assert not caplog.text
    theirs["backbone"]["window"] = 4
    load()
    assert "was trained with model.backbone.window=4, this model has 7" in caplog.text


def test_settings_without_effect_on_predictions_and_defaults_are_no_difference(caplog):
    theirs = dfine(dropout=0.1)
    theirs["backbone"]["pretrained"] = True
    ours = copy.deepcopy(theirs)
    ours["head"].pop("dropout")
    ours["head"]["up"] = 0.5  # the default
    theirs["head"].pop("up", None)
    ours["head"]["num_points"] = tuple(ours["head"]["num_points"])
    ours["backbone"]["pretrained"] = False
    theirs["backbone"]["frozen_stages"] = 1
    model = build_model(ours)
    checkpoint = dict(model=model.state_dict(), config=json.dumps(dict(model=theirs)))
    load_weights(model, checkpoint, spec=ours)
    assert not caplog.text


@pytest.mark.parametrize(
    "config", [None, "damaged", json.dumps([]), json.dumps({"model": {"backbone": {"type": "Own"}}})]
)
def test_a_config_that_cannot_be_compared_is_passed_over(config, caplog):
    ours = dfine()
    model = build_model(ours)
    load_weights(model, dict(model=model.state_dict(), config=config), spec=ours)
    assert not caplog.text


def detr(dilation):
    return dict(
        type="DETR",
        num_queries=3,
        num_classes=2,
        backbone=dict(type="ResNet", depth=50, norm="frozen_bn", dilation=dilation, pretrained=False),
        neck=dict(type="ChannelProjection", out_channels=16),
        head=dict(type="DETRHead", d_model=16, num_heads=2, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1),
    )


def other(dilation):
    """The error for weights that were trained with this dilation."""
    return f"was trained with model.backbone.dilation={dilation}, this model has {not dilation}. Names and shapes"


@pytest.fixture(scope="module")
def models():
    return {dilation: build_model(detr(dilation)) for dilation in (False, True)}


@pytest.mark.parametrize("dilation", [True, False])
def test_run_with_the_other_dilation_is_an_error(models, dilation):
    checkpoint = dict(model=models[dilation].state_dict(), config=json.dumps(dict(model=detr(dilation))))
    load_weights(models[dilation], checkpoint)
    with pytest.raises(CheckpointError, match=other(dilation) + rf".*dilation={str(dilation).lower()}\."):
        load_weights(models[not dilation], checkpoint)


def test_dilation_is_known_from_official_settings(models):
    checkpoint = dict(model=models[True].state_dict(), args=Namespace(dilation=True))
    with pytest.raises(CheckpointError, match=other(True)):
        load_weights(models[False], checkpoint)


def test_dilation_is_known_from_the_model_zoo_name(models, monkeypatch, tmp_path):
    torch.save({"model": models[True].state_dict()}, tmp_path / "weights.pth")
    monkeypatch.setattr(locate, "fetch_published", lambda name: tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=other(True)):
        load_weights(models[False], "detr_r50_dc5")
    with pytest.raises(CheckpointError, match=other(False)):
        load_weights(models[True], "detr_r50")


def test_dilation_is_known_from_a_published_file(models, tmp_path):
    for name, dilation in (("detr-r50-e632da11.pth", False), ("detr-r50-dc5-f0fb7ef5.pth", True)):
        torch.save({"model": models[dilation].state_dict()}, tmp_path / name)
        load_weights(models[dilation], tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name}: {other(dilation)}"):
            load_weights(models[not dilation], tmp_path / name)


def test_nothing_is_guessed_from_other_names(models, tmp_path, caplog):
    torch.save({"model": models[True].state_dict()}, tmp_path / "my_detr_dc5.pth")
    load_weights(models[False], tmp_path / "my_detr_dc5.pth")
    assert not caplog.text


def test_training_may_start_from_either_dilation(models, caplog):
    checkpoint = dict(model=models[True].state_dict(), config=json.dumps(dict(model=detr(True))))
    with caplog.at_level(logging.WARNING, "vitkit"):
        load_weights(models[False], checkpoint, new_class_head=True)
    assert "was trained with model.backbone.dilation=True, this model has False" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("norm", True), ("blocks", [0, 2, 3])])
def test_maps_of_other_blocks_or_with_a_norm_are_an_error(name, value):
    vit = dict(type="ViT", d_model=32, depth=4, num_heads=2, positions="rotary")
    ours = load_config("deimv2_s_coco", check=False)["model"] | dict(num_classes=3, num_queries=5, training_queries=[])
    ours["backbone"] = dict(type="SpatialAdapter", vit=vit, blocks=[0, 1, 3], channels=4, out_channels=32, norm=False)
    theirs = ours | dict(backbone=dict(ours["backbone"], **{name: value}))
    checkpoint = dict(model=build_model(theirs).state_dict(), config=json.dumps(dict(model=theirs)))
    load_weights(build_model(theirs), checkpoint, spec=theirs)
    with pytest.raises(CheckpointError, match=rf"was trained with model\.backbone\.{name}=.* results would be wrong"):
        load_weights(build_model(ours), checkpoint, spec=ours)
