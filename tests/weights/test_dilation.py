"""Weights of a dilated backbone (DC5) have the names and shapes of those of a plain one."""

import json
import logging
from argparse import Namespace

import pytest
import torch

from vitkit import model_zoo
from vitkit.engine.build import build_model
from vitkit.errors import CheckpointError
from vitkit.weights import load_weights


def spec(dilation):
    return dict(
        type="DETR",
        num_queries=3,
        num_classes=2,
        backbone=dict(type="ResNet", depth=50, norm="frozen_bn", dilation=dilation, pretrained=False),
        neck=dict(type="ChannelProjection", out_channels=16),
        head=dict(type="DETRHead", d_model=16, num_heads=2, d_ffn=8, num_encoder_layers=1, num_decoder_layers=1),
    )


@pytest.fixture(scope="module")
def models():
    return {dilation: build_model(spec(dilation)) for dilation in (False, True)}


@pytest.mark.parametrize("dilation", [True, False])
def test_run_with_the_other_dilation_is_an_error(models, dilation):
    checkpoint = dict(model=models[dilation].state_dict(), config=json.dumps(dict(model=spec(dilation))))
    load_weights(models[dilation], checkpoint)
    trained, ours = ("dilated", "not") if dilation else ("not dilated", "dilated")
    expected = (
        rf"is of a backbone that is {trained} \(DC5\), and this model's is {ours}\..*dilation={str(dilation).lower()}"
    )
    with pytest.raises(CheckpointError, match=expected):
        load_weights(models[not dilation], checkpoint)


def test_dilation_is_known_from_official_settings(models):
    checkpoint = dict(model=models[True].state_dict(), args=Namespace(dilation=True))
    with pytest.raises(CheckpointError, match=r"is of a backbone that is dilated \(DC5\)"):
        load_weights(models[False], checkpoint)


def test_dilation_is_known_from_the_model_zoo_name(models, monkeypatch, tmp_path):
    torch.save({"model": models[True].state_dict()}, tmp_path / "weights.pth")
    monkeypatch.setattr(model_zoo, "published_weights", lambda name: tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"is of a backbone that is dilated \(DC5\)"):
        load_weights(models[False], "detr_r50_dc5")
    with pytest.raises(CheckpointError, match=r"is of a backbone that is not dilated \(DC5\)"):
        load_weights(models[True], "detr_r50")


def test_dilation_is_known_from_a_published_file(models, tmp_path):
    for name, dilation in (("detr-r50-e632da11.pth", False), ("detr-r50-dc5-f0fb7ef5.pth", True)):
        torch.save({"model": models[dilation].state_dict()}, tmp_path / name)
        load_weights(models[dilation], tmp_path / name)
        with pytest.raises(
            CheckpointError, match=rf"{name}: is of a backbone that is {'' if dilation else 'not '}dilated"
        ):
            load_weights(models[not dilation], tmp_path / name)


@pytest.mark.parametrize(("name", "warns"), [("my_detr_dc5.pth", True), ("detr_dc50.pth", False)])
def test_file_name_with_the_other_dilation_causes_a_warning(models, tmp_path, caplog, name, warns):
    torch.save({"model": models[True].state_dict()}, tmp_path / name)
    with caplog.at_level(logging.WARNING, "vitkit"):
        load_weights(models[False], tmp_path / name)
        load_weights(models[True], tmp_path / name)
    messages = [record.message for record in caplog.records]
    assert len(messages) == warns and all(
        "seems, by its name, to be of a backbone that is dilated" in m for m in messages
    )


def test_training_may_start_from_either_dilation(models, caplog):
    checkpoint = dict(model=models[True].state_dict(), config=json.dumps(dict(model=spec(True))))
    with caplog.at_level(logging.WARNING, "vitkit"):
        load_weights(models[False], checkpoint, new_class_head=True)
    assert "is of a backbone that is dilated (DC5)" in caplog.text
