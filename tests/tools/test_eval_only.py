"""vitkit test --eval-only: existing predictions are scored without a model."""

import json

import numpy as np
import pytest
import torch

from vitkit import EVALUATORS, build_dataset, build_model, load_config
from vitkit.apps.training.testing import Evaluation
from vitkit.errors import ConfigError
from vitkit.protocols.evaluator import Evaluator
from vitkit.tools import test as test_tool
from vitkit.weights import LoadReport

CONFIG = """
def config():
    val = dict(type="ShapesSegmentation", task={task!r}, num_images=3, image_size=48, split="val")
    return dict(
        model=dict(type="DETR"), data=dict(val=val), evaluator={evaluator!r}, train=dict(epochs=1),
    )
"""
EVALUATOR = {
    "instance": dict(type="CocoEvaluator", iou_types=["segm"]),
    "panoptic": dict(type="PanopticEvaluator"),
    "semantic": dict(type="SemanticEvaluator"),
}


def predict(dataset, index, task):
    """Return the ground truth of an image as a prediction, except for a quarter of its rows."""
    target = dataset[index]["target"]
    if task == "instance":
        masks = target["masks"].clone()
        masks[:, :12] = False
        boxes = torch.tensor([[0.0, 0, 48, 48]]).expand(len(masks), 4)
        return dict(masks=masks, labels=target["labels"], scores=torch.ones(len(masks)), boxes_xyxy=boxes)
    if task == "semantic":
        labels = dataset.load_semantic(index).astype(np.int64)
        labels[:12] = 0
        return dict(semantic=torch.from_numpy(labels))
    ids, segments = dataset.load_panoptic(index)
    ids = ids.copy()
    ids[:12] = 0
    return dict(panoptic=torch.from_numpy(ids), segments_info=[s for s in segments if (ids == s["id"]).any()])


@pytest.mark.parametrize("task", EVALUATOR)
def test_written_results_are_scored_the_same_again(task, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG.format(task=task, evaluator=EVALUATOR[task]))
    val = dict(type="ShapesSegmentation", task=task, num_images=3, image_size=48, split="val")
    dataset = build_dataset(val)
    evaluator = EVALUATORS.build(EVALUATOR[task], dataset=dataset)
    for index in range(3):
        evaluator.update([predict(dataset, index, task)], [dataset[index]["target"]])
    metrics = evaluator.compute()
    assert any(0 < value < 1 for value in metrics.values())
    evaluator.write_results(tmp_path / "results.json")
    test_tool.main(["config.py", "--eval-only", "results.json", "--per-class", "data.val_images_per_gpu=2"])
    printed = capsys.readouterr().out
    assert evaluator.table() in printed and "star" in printed


def test_thresholds_and_confusion_are_of_the_iou_that_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = build_dataset(dict(type="ShapesDetection", num_images=1, image_size=48, split="val", max_objects=1))
    (tmp_path / "config.py").write_text("""
def config():
    val = dict(type="ShapesDetection", num_images=1, image_size=48, split="val", max_objects=1)
    return dict(
        model=dict(type="DETR"), data=dict(val=val), evaluator=dict(type="CocoEvaluator"), train=dict(epochs=1),
    )
""")
    (truth,) = dataset.ground_truth()["annotations"]
    x, y, width, height = truth["bbox"]
    found = dict(image_id=truth["image_id"], category_id=truth["category_id"], score=0.9)
    (tmp_path / "results.json").write_text(json.dumps([{**found, "bbox": [x, y, width, 0.71 * height]}]))
    for iou, correct in ((0.3, 1), (0.7, 1), (0.72, 0), (0.9, 0)):
        options = ["--iou", str(iou), "--thresholds", "0.5", "--confusion", "0.5"]
        test_tool.main(["config.py", "--eval-only", "results.json", *options])
        printed = capsys.readouterr().out
        row = next(line for line in printed.splitlines() if line.strip().startswith("0.500")).split()
        assert row[4] == str(correct) and f"IoU of at least {iou:g}: {correct} correct" in printed


def test_wrong_command_lines_and_evaluators_are_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG.format(task="panoptic", evaluator=EVALUATOR["panoptic"]))
    for argv in (["config.py"], ["config.py", "weights.pth", "--eval-only", "results.json"]):
        with pytest.raises(SystemExit) as error:
            test_tool.main(argv)
        expected = (
            "give either weights or --eval-only RESULTS" if len(argv) > 1 else "config.py: a config has no weights"
        )
        assert expected in f"{error.value.code}\n{capsys.readouterr().err}"
    with pytest.raises(SystemExit, match="error: results: no file 'results.json'"):
        test_tool.main(["config.py", "--eval-only", "results.json"])
    with pytest.raises(SystemExit, match="results.json: LanguageModelEvaluator cannot read predictions from files"):
        test_tool.main(["config.py", "--eval-only", "results.json", "evaluator=LanguageModelEvaluator"])


SEMANTIC = """
def config():
    val = dict(type="ShapesSegmentation", task="semantic", num_images=2, image_size=48, split="val")
    model = dict(
        type="MaskFormer", num_queries=5, tasks=["semantic"],
        backbone=dict(type="ResNet", depth=18, out_features=["res2", "res3"], pretrained=False),
        neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=32),
        head=dict(type="MaskFormerHead", d_model=32, num_heads=4, d_ffn=32, num_decoder_layers=1),
    )
    return dict(
        model=model, data=dict(val=val, num_workers=0), evaluator=dict(type="SemanticEvaluator"), train=dict(epochs=1),
    )
"""


def test_augmented_predictions_are_evaluated_and_scored_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(SEMANTIC)
    model = build_model(load_config("config.py")["model"], classes=["class"] * 10)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    test_tool.main(["config.py", "weights.pth", "--tta", "--tta-scales", "0.5,1", "--out", "first.json"])
    table = capsys.readouterr().out.split("results are in")[0].strip().splitlines()[-12:]
    test_tool.main(["config.py", "--eval-only", "first.json"])
    assert capsys.readouterr().out.strip().splitlines()[-12:] == table
    with pytest.raises(SystemExit):
        test_tool.main(["config.py", "--eval-only", "first.json", "--tta"])
    assert "--eval-only has no model" in capsys.readouterr().err
    for options, message in (
        (["--eval-only", "first.json", "--tiles", "64"], "--tiles changes what a model predicts, and --eval-only has"),
        (["--eval-only", "first.json", "--out", "new.json"], "--eval-only only reads some: leave out --out"),
        (["weights.pth", "--tta-scales", "0.5,1"], "--tta-scales are those of --tta: give both"),
    ):
        with pytest.raises(SystemExit):
            test_tool.main(["config.py", *options])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="not defined for MaskFormer of task instance"):
        test_tool.main(["config.py", "weights.pth", "--tta", "model.tasks=['instance']"])


class Counting(Evaluator):
    """A user's evaluator with only what it must have."""

    def update(self, predictions, targets):
        """Add one batch."""

    def gather(self):
        """Gather the batches of all ranks."""

    def compute(self):
        """Return the metrics."""
        return {"count": 1.0}

    def table(self):
        """Return the metrics as text."""
        return "count 1"


def test_results_that_an_evaluator_cannot_write_are_an_error_only_if_requested(tmp_path, capsys):
    result = Evaluation({"count": 1.0}, Counting(), LoadReport("r/best.pth", None), 0.1, "image")
    test_tool.write(result, tmp_path / "results.json", requested=False)
    assert capsys.readouterr().out == "no results file: Counting does not write its predictions\n"
    with pytest.raises(ConfigError, match="Counting does not write its predictions to files"):
        test_tool.write(result, tmp_path / "results.json", requested=True)
