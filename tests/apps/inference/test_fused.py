"""A predictor runs a fused copy of its model, which follows the model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.every_model import IMAGE, dense_model
from tests.helpers.norm_statistics import randomize_norms
from vitkit import AttentionRecorder
from vitkit.apps.export_reading.settings import ExportSettings
from vitkit.apps.export_writing.export import parts_of
from vitkit.apps.inference.fused import FusedCopy, _warn_of_training
from vitkit.apps.inference.predictor import Predictor
from vitkit.backbones.resnet import ResNet
from vitkit.errors import ConfigError
from vitkit.nn.fusion import FusedConv


@pytest.fixture
def predictor():
    return Predictor(randomize_norms(dense_model("RTDETR").eval()), ["a", "b", "c"])


def scores(predictor):
    return predictor.run([IMAGE])[0]["scores"]


def expected_scores(predictor):
    with torch.inference_mode():
        batch = predictor.prepare([IMAGE])
        outputs = predictor.model(**batch.inputs)
        return predictor.model.postprocess(outputs, [IMAGE.shape[:2]])[0]["scores"]


def is_fused(model):
    return any(isinstance(module, FusedConv) for module in model.modules())


def test_predictions_are_the_models_and_the_model_stays_as_it_is(predictor):
    state = {name: value.clone() for name, value in predictor.model.state_dict().items()}
    torch.testing.assert_close(scores(predictor), expected_scores(predictor), atol=1e-5, rtol=1e-4)
    assert is_fused(predictor._fused.of(predictor.model))
    assert not is_fused(predictor.model)
    assert all(torch.equal(value, state[name]) for name, value in predictor.model.state_dict().items())
    predictor.model.train()


def test_copy_is_made_once(predictor):
    assert predictor._fused.of(predictor.model) is predictor._fused.of(predictor.model)


def test_a_copy_that_was_interrupted_is_made_by_the_next_call(predictor, monkeypatch):
    def interrupted(model):
        monkeypatch.undo()
        assert is_fused(fused.of(model))  # another thread asks for it, too
        raise KeyboardInterrupt

    fused = FusedCopy()
    monkeypatch.setattr("vitkit.apps.inference.fused.fused_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fused.of(predictor.model)
    assert is_fused(fused.of(predictor.model))


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.rand(1, 3, 64, 64))["pred_logits"].sum().backward()
    optimizer.step()


def train_statistics(model):
    model.train()
    with torch.no_grad():
        model(torch.rand(2, 3, 64, 64))
    model.eval()


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(other_state()),
    "load_state_dict, assigned": lambda model: model.load_state_dict(other_state(), assign=True),
    "a step of an optimizer": step,
    "a setting": lambda model: setattr(model, "num_detections", 3),
    "statistics of norms": train_statistics,
    "a layer without weights": lambda model: setattr(model.backbone, "maxpool", nn.AvgPool2d(3, 2, 1).eval()),
    "a setting of a layer": lambda model: setattr(model.backbone.layer1[0].bn1, "eps", 0.5),
    "another layer": lambda model: setattr(model.backbone, "conv1", nn.Conv2d(3, 64, 7, 2, 3, bias=False).eval()),
}


def other_state():
    torch.manual_seed(5)
    return randomize_norms(dense_model("RTDETR"), 5).state_dict()


@pytest.mark.parametrize("change", CHANGES)
def test_predictions_follow_changes_of_the_model(predictor, change):
    before = scores(predictor)
    CHANGES[change](predictor.model)
    after = scores(predictor)
    assert len(after) != len(before) or not torch.allclose(after, before, atol=1e-5)
    torch.testing.assert_close(after, expected_scores(predictor), atol=1e-5, rtol=1e-4)


def test_another_model_in_its_place_is_run(predictor):
    scores(predictor)
    predictor.model = randomize_norms(dense_model("RTDETR").eval(), 7)
    torch.testing.assert_close(scores(predictor), expected_scores(predictor), atol=1e-5, rtol=1e-4)


def test_attention_and_hooks_of_the_model_are_recorded(predictor):
    scores(predictor)
    with AttentionRecorder(predictor.model) as maps:
        scores(predictor)
    assert "neck.encoder.self_attn" in maps
    seen = []
    handle = predictor.model.backbone.layer1[0].register_forward_hook(lambda *_: seen.append(1))
    scores(predictor)
    handle.remove()
    scores(predictor)
    assert seen == [1]


def test_training_mode_compiled_models_and_others_run_as_they_are(predictor):
    model, fused = predictor.model, FusedCopy()
    assert fused.of(model.train()) is model
    assert fused.of(model.eval()) is not model
    assert fused.of(nn.Identity()) is not None
    already = model.fused_copy()
    assert fused.of(already) is already
    model.backbone.layer1.compile()  # does nothing until it is called
    assert fused.of(model) is model
    compiled = dense_model("RTDETR").eval()
    compiled.compile()
    assert fused.of(compiled) is compiled


@pytest.mark.parametrize(
    "name", ["backbone.conv1.weight", "backbone.bn1.running_var", "backbone.layer1.0.conv1.weight"]
)
def test_weights_that_are_not_finite_stay_visible(predictor, caplog, name):
    predictor.model.state_dict(keep_vars=True)[name].data.view(-1)[0] = float("nan")
    with pytest.raises(ConfigError, match=f"fuse: RTDETR has weights that are not finite, in {name}"):
        predictor.model.fused_copy()
    with caplog.at_level("INFO", logger="vitkit"):
        assert predictor._fused.of(predictor.model) is predictor.model
    assert "RTDETR is not fused for inference: fuse: RTDETR has weights that are not finite" in caplog.text


def test_predictions_in_training_mode_warn_once(predictor, caplog):
    _warn_of_training.cache_clear()
    predictor.model.train()
    for _ in range(2):
        predictor.run([IMAGE])
    assert caplog.text.count("RTDETR predicts in training mode: dropout is on, and each batch changes") == 1


def test_fixed_norms_that_are_broken_stay_visible():
    model = dense_model("DETR").eval()
    model.backbone = ResNet(18, norm="frozen_bn").eval()
    for name, value, message in (
        ("weight", float("nan"), "weights that are not finite, in backbone.bn1.weight"),
        ("bias", float("inf"), "weights that are not finite, in backbone.bn1.bias"),
        ("running_var", -1.0, "variances below 0, in backbone.bn1.running_var"),
    ):
        broken = copy.deepcopy(model)
        getattr(broken.backbone.bn1, name)[0] = value
        with pytest.raises(ConfigError, match=f"fuse: DETR has {message}"):
            broken.fused_copy()
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))  # no norm's
    assert model.fused_copy().is_fused


def test_export_takes_models_that_are_fused_or_cannot_be_copied(predictor):
    def traced():
        return parts_of(predictor, ExportSettings(size=(64, 64)), [IMAGE])[0].graph.model

    assert traced() is not predictor.model
    predictor.model.fuse()
    assert is_fused(traced())
    predictor.model.handle = (line for line in ())
    assert traced() is predictor.model


def test_model_that_cannot_be_copied_runs_as_it_is(predictor, caplog):
    predictor.model.handle = (line for line in ())  # generators have no copies
    with caplog.at_level("INFO", logger="vitkit"):
        assert np.isfinite(scores(predictor)).all()
    assert "RTDETR is not fused for inference: cannot pickle 'generator' object" in caplog.text
