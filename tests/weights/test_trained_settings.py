"""Settings that change results but not the weights' names and shapes."""

import copy
import json
import logging

import pytest

from vitkit import load_config
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.weights import load_weights
from vitkit.weights.trained_settings import warn_of_other_settings


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
    ours = dict(type="PerPixelClassification", num_classes=3, neck=dict(type="FPN", out_channels=16))
    ours |= dict(backbone="swin_tiny", head=dict(type="PerPixelHead"))
    theirs = copy.deepcopy(ours) | dict(backbone=dict(type="Swin", depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]))
    warn_of_other_settings(ours, {"config": json.dumps(dict(model=theirs))}, "a.pth")
    assert not caplog.text
    theirs["backbone"]["window"] = 4
    warn_of_other_settings(ours, {"config": json.dumps(dict(model=theirs))}, "a.pth")
    assert "a.pth: was trained with model.backbone.window=4, this model has 7" in caplog.text


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
