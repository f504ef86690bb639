"""The tools from their command lines to the files that they write."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from helpers.real_runs import finish, start
from PIL import Image
from pycocotools.coco import COCO

from vitkit import BACKBONES, build_dataset
from vitkit.apps.inference import load
from vitkit.apps.visualization.curves import read_log
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.structures import ScoreThresholds
from vitkit.tools import analyze, browse, explain, predict
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TINY = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=2)
    world = dict(type="ShapesDetection", image_size=32, max_objects=2, min_size=0.3, max_size=0.5)
    cfg["data"] = dict(
        train=dict(**world, num_images=8), val=dict(**world, num_images=5, split="val"),
        images_per_gpu=4, val_images_per_gpu=2, num_workers=0,
    )
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=1, log_every=1, best_metric="bbox/AP50")
    return cfg
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A config file that trains in a second; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return str(path)


def fails(capsys, main, *args) -> str:
    """The one-line message of a run that ends with an error."""
    with pytest.raises(SystemExit) as error:
        main([*map(str, args), "--device", "cpu"])
    message = str(error.value.code)
    assert message.startswith("error: ") and "Traceback" not in capsys.readouterr().err
    return message


def train(*args):
    train_tool.main([*map(str, args), "--device", "cpu"])


def evaluate(*args):
    test_tool.main([*map(str, args), "--device", "cpu"])


def table_of(text: str) -> list[str]:
    """Return the lines with the twelve numbers of the boxes."""
    (line,) = (line for line in text.splitlines() if line.startswith("boxes "))
    return line.split()[1:]


def write_coco(folder: Path, *, ids=(3, 7, 90), names=("cat", "dog", "cow"), num_images=4, **changes) -> list[str]:
    """A tiny dataset in COCO's format; returns the overrides that name it. `changes` replace parts of the file."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    images, annotations = [], []
    for i in range(num_images):
        cv2.imwrite(str(folder / "images" / f"{i}.jpg"), rng.integers(0, 255, (40, 48, 3), dtype=np.uint8))
        images.append({"id": 100 + i, "file_name": f"{i}.jpg", "height": 40, "width": 48})
        box = {"bbox": [4 + i, 5, 20, 16], "area": 320, "iscrowd": 0}
        annotations.append({"id": i + 1, "image_id": 100 + i, "category_id": ids[i % len(ids)], **box})
    categories = [{"id": raw, "name": name} for raw, name in zip(ids, names)]
    content = {"images": images, "annotations": annotations, "categories": categories, **changes}
    (folder / "instances.json").write_text(json.dumps(content))
    paths = {"images": folder / "images", "annotations": folder / "instances.json"}
    return [f"data.{split}.{key}={path}" for split in ("train", "val") for key, path in paths.items()]


@pytest.fixture
def coco_config(tmp_path, monkeypatch):
    """The tiny model on COCO files, which overrides name."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "coco.py"
    extra = """
    cfg["data"]["train"] = dict(type="CocoDetection", images="{root}/images", annotations="{root}/instances.json")
    cfg["data"]["val"] = dict(type="CocoDetection", images="{root}/images", annotations="{root}/instances.json")
    return cfg
"""
    path.write_text(TINY.rstrip().removesuffix("return cfg") + extra.lstrip("\n").removeprefix("    "))
    return str(path)


def test_run_writes_all_its_files_and_prints_the_table(tiny, tmp_path, capsys):
    train(tiny)
    run = tmp_path / "runs" / "tiny"
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "log.jsonl", "last.pth", "best.pth", "curves.png", "predictions.png"} <= names
    assert {"run.json", "console.txt"} <= names
    for photo in ("curves.png", "predictions.png"):
        assert cv2.imread(str(run / photo)).std() > 10
    assert len(table_of(capsys.readouterr().out)) == 12
    saved = read_checkpoint(run / "last.pth")
    assert saved["classes"] == ["circle", "square", "triangle", "star", "ring", "cross"]
    assert json.loads(saved["config"])["model"]["type"] == "DETR"


def test_runs_are_numbered_and_none_is_overwritten(tiny, tmp_path, capsys):
    train(tiny)
    train(tiny)
    assert (tmp_path / "runs" / "tiny-2" / "last.pth").is_file()
    message = fails(capsys, train_tool.main, tiny, "--run-dir", tmp_path / "runs" / "tiny")
    assert "already contains a run" in message and "--resume" in message


def test_testing_repeats_the_validation_and_writes_results_for_pycocotools(tiny, tmp_path, capsys):
    train(tiny)
    trained = table_of(capsys.readouterr().out)
    out = tmp_path / "results.json"
    evaluate(tiny, "runs/tiny/last.pth", "--per-class", "--out", out)
    printed = capsys.readouterr().out
    assert table_of(printed) == trained
    assert all(re.search(rf"{name}\s+AP", printed) for name in ("circle", "square", "cross"))
    truth = COCO()
    truth.dataset = build_dataset(
        dict(
            type="ShapesDetection", image_size=32, max_objects=2, min_size=0.3, max_size=0.5, num_images=5, split="val"
        )
    ).ground_truth()
    truth.createIndex()
    assert len(truth.loadRes(str(out)).anns) == 5 * 10


def test_checkpoints_keep_what_the_evaluation_measured(tiny, monkeypatch, capsys):
    found = ScoreThresholds(0.25, (0.5, *[None] * 5), "highest F1")
    # After such a short training nothing is detected.
    monkeypatch.setattr(CocoEvaluator, "score_thresholds", lambda evaluator: found)
    train(tiny, "train.save_every_steps=1")
    expected = {
        "score_thresholds": {"overall": 0.25, "by_class": {"circle": 0.5}, "origin": "highest F1 in validation"},
        "image_sizes": {"least_short": 32, "median_short": 32, "most_short": 32, "most_long": 32},
    }
    assert all(read_checkpoint(f"runs/tiny/{name}.pth")["measured"] == expected for name in ("best", "last"))
    assert load("runs/tiny").thresholds == replace(found, origin="highest F1 in validation")
    capsys.readouterr()
    evaluate("runs/tiny/last.pth")
    stored = "the model shows objects from score 0.25 to 0.50, by class (highest F1 in validation)"
    assert f"{stored}\nbest in this evaluation: score 0.25 to 0.50, by class (highest F1)" in capsys.readouterr().out
    evaluate("runs/tiny/last.pth", "--split", "train")
    best = "best on data.train, and not stored: score 0.25 to 0.50, by class (highest F1)"
    assert f"{stored}\n{best}" in capsys.readouterr().out
    # A resumed run has the thresholds from the start, not only after its next evaluation.
    monkeypatch.setattr(CocoEvaluator, "score_thresholds", lambda evaluator: None)
    train("--resume", "runs/tiny")
    assert read_checkpoint("runs/tiny/last.pth")["measured"] == expected


@pytest.mark.parametrize("name", [["runs/tiny"], ["runs/tiny/best.pth"], ["runs/tiny/config.json", "runs/tiny"]])
def test_every_tool_accepts_a_run_by_any_of_its_names(tiny, tmp_path, capsys, name):
    train(tiny, "train.epochs=1")
    capsys.readouterr()
    test_tool.main([*name, "data.val.num_images=2", "--device", "cpu"])
    assert "results are in runs/tiny/results.json" in capsys.readouterr().out
    image = tmp_path / "shape.png"
    Image.fromarray(build_dataset(dict(type="ShapesDetection", num_images=1)).load_image(0)).save(image)
    explain.main([*name, "--image", str(image), "--device", "cpu"])
    assert "shape_decoder.png" in capsys.readouterr().out
    predict.main([*name, "--input", str(image), "--device", "cpu"])
    assert "predictions.json" in capsys.readouterr().out
    analyze.main([name[0], "--no-macs"])
    browse.main([name[0], "--max-images", "1"])
    assert "wrote runs/browse/index.html" in capsys.readouterr().out


def test_resumed_run_equals_an_uninterrupted_one_and_names_changes(tiny, tmp_path, capsys):
    train(tiny, "train.epochs=2", "--run-dir", tmp_path / "whole")
    train(tiny, "--run-dir", tmp_path / "parts")
    train("--resume", tmp_path / "parts", "train.epochs=2")
    whole, parts = (read_checkpoint(tmp_path / name / "last.pth") for name in ("whole", "parts"))
    assert parts["progress"] == whole["progress"] and parts["progress"]["epoch"] == 2
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name
    assert "resuming with a changed train.epochs" in capsys.readouterr().err


@pytest.mark.parametrize("ids", [(3, 7, 90), (0, 1, 2)])
def test_users_data_need_only_their_paths(coco_config, tmp_path, capsys, ids):
    overrides = write_coco(tmp_path / "data", ids=ids)
    train(coco_config, *overrides, "--run-dir", "run")
    evaluate(coco_config, "run/last.pth", *overrides, "--per-class", "--out", "results.json")
    printed = capsys.readouterr().out
    assert all(re.search(rf"{name}\s+AP", printed) for name in ("cat", "dog", "cow"))
    results = json.loads(Path("results.json").read_text())
    assert {r["category_id"] for r in results} <= set(ids) and {r["image_id"] for r in results} == {100, 101, 102, 103}
    saved = read_checkpoint("run/last.pth")
    assert saved["classes"] == ["cat", "dog", "cow"] and saved["category_ids"] == list(ids)


def test_fine_tuning_to_other_classes_reinitializes_only_the_class_head(tiny, coco_config, tmp_path, capsys):
    train(tiny, "--run-dir", "shapes")
    train(
        coco_config, *write_coco(tmp_path / "data"), "--init", "shapes/last.pth", "optimizer.lr=0.0", "--run-dir", "own"
    )
    assert "newly initialized: head.class_embed.weight, head.class_embed.bias" in capsys.readouterr().err
    before, after = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("shapes", "own"))
    assert torch.equal(before["head.bbox_embed.layers.0.weight"], after["head.bbox_embed.layers.0.weight"])
    assert before["head.class_embed.weight"].shape == (7, 32) and after["head.class_embed.weight"].shape == (4, 32)


def test_user_defined_backbone_trains(tiny, tmp_path):
    (tmp_path / "my_backbone.py").write_text("""
from torch import nn
from vitkit import BACKBONES
from vitkit.structures import FeatureInfo


@BACKBONES.register
class Patches(nn.Module):
    def __init__(self, channels: int = 64):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 8, stride=8)
        self.feature_info = {"patches": FeatureInfo(channels=channels, stride=8)}

    def forward(self, images):
        return {"patches": self.conv(images)}
""")
    (tmp_path / "my_config.py").write_text(
        TINY.replace(
            "    return cfg",
            '    cfg["imports"] = ["my_backbone.py"]\n'
            '    cfg["model"]["backbone"] = dict(type="Patches", channels=16)\n    return cfg',
        )
    )
    train(tmp_path / "my_config.py", "--run-dir", "run")
    assert "Patches" in BACKBONES.names()
    assert read_checkpoint("run/last.pth")["model"]["backbone.conv.weight"].shape == (16, 3, 8, 8)


@pytest.mark.parametrize(
    "options",
    [
        ["train.precision=bf16", "train.ema_decay=0.9"],
        ["train.precision=fp16", "train.accumulate=2"],
        ["train.activation_checkpointing=true", "schedule=CosineLR"],
    ],
)
def test_training_completes_with_each_option(tiny, tmp_path, options):
    train(tiny, *options, "--run-dir", "run")
    assert read_checkpoint("run/last.pth")["progress"]["epoch"] == 1


def test_two_ranks_give_the_metrics_of_one(tiny, tmp_path, capfd):
    def on_two_ranks(tool, *args):
        Path("output.txt").unlink(missing_ok=True)
        assert finish(start(*args, ranks=2, tool=tool)) == [0, 0], Path("output.txt").read_text()[-3000:]
        return Path("output.txt").read_text()

    # Images 4 per rank, 5 to evaluate: one rank has an image more than the other.
    printed = on_two_ranks("train", tiny, "--run-dir", "run")
    assert "2 x cpu" in printed and len(table_of(printed)) == 12
    two = on_two_ranks("test", tiny, "run/last.pth", "--out", "two.json")
    capfd.readouterr()
    evaluate(tiny, "run/last.pth", "--out", "one.json")
    assert table_of(capfd.readouterr().out) == table_of(two)

    def rows(name):
        return sorted(json.loads(Path(name).read_text()), key=lambda r: (r["image_id"], -r["score"], r["bbox"]))

    one, two = rows("one.json"), rows("two.json")
    assert [r["image_id"] for r in one] == [r["image_id"] for r in two]
    assert [r["category_id"] for r in one] == [r["category_id"] for r in two]
    np.testing.assert_allclose([r["score"] for r in one], [r["score"] for r in two], atol=1e-5)


def test_an_image_that_one_rank_lacks_ends_an_evaluation_on_all_with_one_line_each(coco_config, tmp_path):
    overrides = write_coco(tmp_path / "data", num_images=8)
    train(coco_config, *overrides, "--run-dir", "run")
    (tmp_path / "data" / "images" / "7.jpg").unlink()
    assert finish(start("run", *overrides, "--out", "two.json", ranks=2, tool="test")) == [1, 1]
    said = Path("output.txt").read_text()
    assert len(re.findall(r"^error(?: \(rank 1\))?: .*7\.jpg", said, re.MULTILINE)) == 1
    others = re.findall(r"^error .*: another rank has ended, .* see that one's error\.$", said, re.MULTILINE)
    assert len(others) == 1
    assert "Traceback" not in said and not Path("two.json").exists()


def broken(case: str, folder: Path) -> list:
    """Arguments of a training run whose data is wrong in one way."""
    good = {"id": 1, "image_id": 100, "category_id": 3, "bbox": [1, 1, 5, 5], "area": 25, "iscrowd": 0}
    changes = {
        "unknown image": {"annotations": [{**good, "image_id": 999}]},
        "unknown category": {"annotations": [{**good, "category_id": 4}]},
        "negative box": {"annotations": [{**good, "bbox": [10, 20, -3, 5]}]},
        "zero-size box": {"annotations": [{**good, "bbox": [10, 20, 0, 5]}]},
        "nan box": {"annotations": [{**good, "bbox": [10, 20, float("nan"), 5]}]},
        "no images": {"images": [], "annotations": []},
    }
    overrides = write_coco(folder, **changes.get(case, {}))
    if case == "malformed json":
        (folder / "instances.json").write_text('{"images": [}')
    if case == "missing image":
        (folder / "images" / "2.jpg").unlink()
    if case == "truncated image":
        (folder / "images" / "2.jpg").write_bytes((folder / "images" / "2.jpg").read_bytes()[:40])
    if case == "missing file":
        (folder / "instances.json").unlink()
    if case == "other classes":
        write_coco(folder / "other", names=("cat", "dog", "pig"))
        overrides[-1] = f"data.val.annotations={folder / 'other' / 'instances.json'}"
    return overrides


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("unknown image", r"annotation 1 .*999"),
        ("unknown category", r"annotation 1 .*category.* 4"),
        ("negative box", r"annotation 1 \(image '0.jpg'\) has bbox \[10, 20, -3, 5\]"),
        ("zero-size box", r"annotation 1 \(image '0.jpg'\) has bbox \[10, 20, 0, 5\]"),
        ("nan box", r"annotation 1 \(image '0.jpg'\) has bbox \[10, 20, nan, 5\]"),
        ("no images", r"the list 'images' is empty; expected at least one image"),
        ("malformed json", r"instances\.json.*line 1"),
        ("missing image", r"2\.jpg"),
        ("truncated image", r"2\.jpg"),
        ("missing file", r"instances\.json"),
        ("other classes", r"data\.train .*'cow' and 'pig'"),
    ],
)
def test_wrong_data_is_an_error_that_names_it(coco_config, tmp_path, capsys, case, expected):
    message = fails(capsys, train_tool.main, coco_config, *broken(case, tmp_path / "data"))
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{tiny}", "train.epoch=2"], "train.epoch: unknown key 'epoch'. Did you mean 'epochs'"),
        (["{tiny}", "train.epochs=two"], "train.epochs"),
        (["{tiny}", "train.epochs"], "train.epochs"),
        (["{tiny}", "model.backbone=resnet51"], "unknown backbone 'resnet51'. Did you mean 'resnet50'"),
        (["{tiny}", "model.type=DETTR"], "Did you mean 'DETR'"),
        (["tinny.py"], "no config file 'tinny.py'. Did you mean 'tiny.py'"),
        (["none/tinny.py"], "no config file 'none/tinny.py'. That folder has no config."),
        (["--resume", "nothing"], "config.json"),
        (["configs/detr_r50.py"], "data/coco/train2017'. Download the dataset"),
        (["{tiny}", "--init", "missing.pth"], "no checkpoint 'missing.pth'"),
        (["{tiny}", "model.num_classes=4"], "model.num_classes=4, but the dataset has 6 classes"),
        (["{tiny}", "model.head.num_heads=5"], "num_heads=5 must divide d_model=32"),
        (["{tiny}", "train.best_metric=segm/AP"], "is no metric of CocoEvaluator with iou_types=['bbox']"),
    ],
)
def test_wrong_arguments_are_helpful_errors(tiny, capsys, arguments, expected):
    message = fails(capsys, train_tool.main, *(a.format(tiny=tiny) for a in arguments))
    assert expected in message


def test_value_given_as_an_option_is_told_how_values_are_set(capsys):
    with pytest.raises(SystemExit):
        train_tool.main(["quickstart/dino", "--epochs", "2"])
    assert "unrecognized arguments: --epochs 2; values of the config are KEY=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("evaluator=dict(type='CocoEvaluator', iou_types=['segm'])", "masks"),
        ("data.val.transforms=dict(type='MultiImageTransforms', mosaic=1.0)", "data.val.transforms: MultiImage"),
    ],
)
def test_validation_that_cannot_work_is_an_error_before_training(tiny, tmp_path, capsys, override, expected):
    assert expected in fails(capsys, train_tool.main, tiny, override, "train.best_metric=none")
    assert not list((tmp_path / "runs").rglob("*.*"))


def test_checking_the_validation_does_not_change_the_run(tiny, monkeypatch):
    train(tiny, "model.head.dropout=0.1", "--run-dir", "checked")
    monkeypatch.setattr("vitkit.engine.validation.check_validation", lambda *args: None)
    train(tiny, "model.head.dropout=0.1", "--run-dir", "unchecked")
    checked, unchecked = (read_log(Path(name) / "log.jsonl")[0] for name in ("checked", "unchecked"))
    assert [record["losses"] for record in checked] == [record["losses"] for record in unchecked]


def test_a_folder_without_a_run_cannot_be_resumed(tiny, tmp_path, capsys):
    train(tiny, "--run-dir", "run")
    (tmp_path / "run" / "last.pth").unlink()
    assert "last.pth" in fails(capsys, train_tool.main, "--resume", "run")


@pytest.mark.parametrize("case", ["another model", "truncated", "pickled code"])
def test_testing_with_a_wrong_checkpoint_is_an_error(tiny, tmp_path, capsys, case):
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": torch.nn.Linear(3, 3).state_dict()}, path)
    if case == "truncated":
        path.write_bytes(path.read_bytes()[:300])
    if case == "pickled code":
        torch.save({"model": os.system}, path)
    expected = {"another model": "does not fit DETR", "truncated": "truncated", "pickled code": "refused"}[case]
    assert expected in fails(capsys, test_tool.main, tiny, path)


def test_error_for_missing_pretrained_weights_names_a_remedy(coco_config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    overrides = write_coco(tmp_path / "data")
    pretrained = ["model.backbone.base_channels=64", "model.backbone.pretrained=true"]
    message = fails(capsys, train_tool.main, coco_config, *overrides, *pretrained)
    assert (
        "resnet18-" in message and "model.backbone.pretrained=False" in message and str(tmp_path / "cache") in message
    )


def test_print_config_names_each_values_origin_and_builds_nothing(capsys):
    train("configs/detr_r50.py", "model.num_queries=300", "--print-config")
    printed = capsys.readouterr().out
    assert re.search(r"num_queries\s*[=:]\s*300\s+# command line", printed)
    assert re.search(r"depth\s*[=:]\s*50\s+# .*configs/detr_r50\.py", printed)
    assert re.search(r"norm_first\s*[=:]\s*False\s+# default", printed)


def test_a_detector_is_reported_by_class_size_threshold_and_confusion(tiny, tmp_path, capsys):
    train(tiny)
    capsys.readouterr()
    options = ["--per-class", "--per-size", "--thresholds", "0", "0.5", "--confusion", "0"]
    evaluate(tiny, "runs/tiny/last.pth", *options, "--out", "out/results.json")
    printed = capsys.readouterr().out
    assert re.search(r"circle +AP \S+ +AP50 \S+ .* objects?\n", printed)
    assert re.search(r"small +AP \S+ .* objects?\n", printed)
    assert re.search(r"precision +recall +F1", printed) and "highest F1" in printed
    assert re.search(r"\d+ (\w+ missed|\w+, no object|\w+ taken for \w+)\n", printed)
    assert re.search(r"\d ms per image on cpu", printed)
    assert cv2.imread("out/results_confusion.png").std() > 10
    test_tool.main([tiny, "--eval-only", "out/results.json", *options, "--out", "again.json"])
    again = capsys.readouterr().out
    assert [line for line in printed.splitlines() if " objects" in line] == [
        line for line in again.splitlines() if " objects" in line
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--thresholds", "--iou", "0.05"], "--iou: '0.05': expected a number above 0.1, up to 1"),
        (["--thresholds", "2"], "expected a number from 0 to 1"),
        (["--eval-only", "none.json", "evaluator=LanguageModelEvaluator", "--thresholds"], "cannot read predictions"),
        (["--eval-only", "none.json", "--confusion"], "no file 'none.json'"),
    ],
)
def test_wrong_report_options_are_errors(tiny, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        test_tool.main([tiny, *(arguments if "--eval-only" in arguments else ["w.pth", *arguments])])
    assert message in f"{error.value.code}\n{capsys.readouterr().err}"


def test_run_with_a_relative_data_path_is_tested_from_another_folder(coco_config, tmp_path, capsys, monkeypatch):
    write_coco(tmp_path / "cows")
    train(coco_config, "data.root=cows")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    evaluate("../runs/coco/config.json", "../runs/coco/last.pth")
    assert len(table_of(capsys.readouterr().out)) == 12
