"""Splits that are evaluated: prepared like the validation data, with a line that says how."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.detection_files import write_data

import vitkit
from vitkit.data.loading.settings import DataSettings
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.structures import ScoreThresholds

CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    photos = dict(
        type="CocoDetection", images="images", annotations="truth.json",
        transforms=dict(type="EvalResize", short_side=48, max_size=96),
    )
    cfg["data"] = dict(train=photos, val=photos, images_per_gpu=3, num_workers=0)
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=1, best_metric="bbox/AP50")
    return cfg
"""
SPLIT = "dict(type='CocoDetection', images='images', annotations='truth.json')"
RESIZE = dict(type="EvalResize", short_side=48, max_size=96)


def test_a_test_split_is_evaluated_like_the_validation_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_data(Path())
    Path("photos.py").write_text(CONFIG)
    run = vitkit.train("photos.py", run_dir="run", device="cpu")
    line = "images {}are resized for the model: shorter side 48, longer side up to 64 pixels (stored: shorter side 90, "
    assert "validation " + line.format("(first batch) ") in capsys.readouterr().out
    result = vitkit.test("run", split="test", device="cpu", **{"data.test": SPLIT})
    assert line.format("") in capsys.readouterr().out
    assert result.metrics == {name: run.metrics[name] for name in result.metrics}
    squashed = {"data.val.transforms": dict(type="EvalResize", size=(64, 64))}
    vitkit.test("run", split="test", device="cpu", **{"data.test": SPLIT}, **squashed)
    line = "images are resized for the model: to 64x64 pixels (width x height), whatever their proportions (stored: "
    assert line in capsys.readouterr().out
    answers = {image: prediction.scores.tolist() for image, prediction in result.evaluator.stored_predictions.items()}
    native = vitkit.test("run", split="test", device="cpu", **{"data.test": SPLIT, "data.test.transforms": None})
    assert "images are evaluated at their stored size: shorter side 90, " in capsys.readouterr().out
    assert answers != {
        image: prediction.scores.tolist() for image, prediction in native.evaluator.stored_predictions.items()
    }


def test_the_thresholds_of_a_run_are_those_that_validation_chose(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(Path())
    Path("photos.py").write_text(CONFIG)
    monkeypatch.setattr(CocoEvaluator, "score_thresholds", lambda self: ScoreThresholds(0.25, origin="highest F1"))
    vitkit.train("photos.py", run_dir="run", device="cpu")
    monkeypatch.setattr(CocoEvaluator, "score_thresholds", lambda self: ScoreThresholds(0.75, origin="highest F1"))
    result = vitkit.test("run", split="test", device="cpu", **{"data.test": SPLIT})
    assert str(result.thresholds) == "score 0.25 (highest F1 in validation)"


@pytest.mark.parametrize("split", ["test", "train"])
def test_a_split_has_the_transforms_of_validation_unless_it_sets_its_own(tmp_path, split):
    write_data(tmp_path)
    photos = dict(type="CocoDetection", images=str(tmp_path / "images"), annotations=str(tmp_path / "truth.json"))
    settings = DataSettings(**{"val": dict(**photos, transforms=RESIZE), split: photos})
    assert settings.evaluation_dataset(split)[0]["target"]["image_size"] == (48, 64)
    squashed = replace(settings, val=dict(**photos, transforms=dict(type="EvalResize", size=(64, 64))))
    assert squashed.evaluation_dataset(split)[0]["target"]["image_size"] == (64, 64)
    if split == "test":
        assert settings.dataset("test")[0]["target"]["image_size"] == (48, 64)
        own = replace(settings, test=dict(**photos, transforms=dict(RESIZE, short_side=30)))
        assert own.evaluation_dataset("test")[0]["target"]["image_size"] == (30, 40)
    # A dataset that takes no transforms, as those of text, is built as it is.
    words = DataSettings(val=dict(**photos, transforms=RESIZE), test=dict(type="NumberWords", num_pairs=3))
    assert len(words.evaluation_dataset("test")) == 3
