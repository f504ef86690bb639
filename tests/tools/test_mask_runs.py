"""Masks from training to figures, results files and scores, with the quickstarts' models and on real images."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from vitkit import build_dataset, load_config
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUICK = {"mask2former_instance": "segm/AP", "mask2former_panoptic": "PQ", "maskformer_semantic": "mIoU"}
TINY = [
    "data.train.num_images=8",
    "data.train.image_size=48",
    "data.val.num_images=3",
    "data.val.image_size=40",
    "data.images_per_gpu=4",
    "data.num_workers=0",
    "schedule.warmup_steps=1",
    "train.epochs=1",
    "train.reference_batch_size=4",
]


@pytest.fixture(autouse=True)
def in_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def metrics_of(run: str) -> dict:
    lines = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    return next(line["metrics"] for line in reversed(lines) if line["kind"] == "val")


def train(config: str, overrides: list[str]) -> dict:
    """Train in the folder "run", check the figure of predictions, and return the metrics."""
    train_tool.main([config, *overrides, "--run-dir", "run", "--device", "cpu"])
    sheet = cv2.imread("run/predictions.png")
    assert min(sheet.shape[:2]) > 300 and len(np.unique(sheet)) > 100
    return metrics_of("run")


def score(capsys, *args: str) -> list[str]:
    """Return the table that vitkit test prints."""
    capsys.readouterr()
    test_tool.main([*args, "--device", "cpu"])
    lines = capsys.readouterr().out.split("results are in")[0].strip().splitlines()
    return [line.strip() for line in lines if line.strip().startswith(("masks", "boxes", "all"))]


@pytest.mark.parametrize("name", QUICK)
def test_quickstart_configs_train_and_results_score_the_same_again(name, capsys):
    config = str(CONFIGS / "quickstart" / f"{name}.py")
    metrics = train(config, TINY)
    assert 0 <= metrics[QUICK[name]] <= 1
    table = score(capsys, config, "run/last.pth", *TINY)
    assert table and score(capsys, config, "--eval-only", "results.json", *TINY) == table


@pytest.mark.parametrize("name", ["mask2former", "per_pixel"])
def test_camvid_configs_have_the_camvid_classes(name, shared_data):
    config = str(CONFIGS / "camvid" / f"{name}.py")
    dataset = build_dataset(load_config(config)["data"]["val"], str(shared_data / "camvid"))
    assert len(dataset) == 101 and len(dataset.classes) == 11


@pytest.mark.parametrize("name", ["coco_panoptic", "coco_instance"])
def test_training_and_testing_work_on_real_images(name, shared_data, capsys):
    config = str(CONFIGS / "overfit" / f"{name}.py")
    overrides = [
        f"data.root={shared_data / dict(coco_panoptic='coco_panoptic', coco_instance='coco_tiny')[name]}",
        "train.epochs=1",
        "data.num_workers=0",
        "schedule.warmup_steps=1",
        *(f"data.{split}.{key}" for split in ("train", "val") for key in ("first=2", "transforms.short_side=96")),
    ]
    metrics = train(config, overrides)
    table = score(capsys, config, "run/last.pth", *overrides)
    assert table and score(capsys, config, "--eval-only", "results.json", *overrides) == table
    results = json.loads(Path("results.json").read_text())
    if name == "coco_instance":
        assert metrics["segm/AP"] >= 0
        assert len({result["image_id"] for result in results}) == 2
        assert all(coco_mask.area(result["segmentation"]) >= 0 for result in results)
        return
    for annotation in results["annotations"]:
        blue, green, red = cv2.split(cv2.imread(f"results/{annotation['file_name']}").astype(np.int64))
        ids = set(np.unique(red + 256 * green + 65536 * blue).tolist()) - {0}
        assert ids == {segment["id"] for segment in annotation["segments_info"]}
        known = {category["id"] for category in results["categories"]} if "categories" in results else None
        assert known is None or {segment["category_id"] for segment in annotation["segments_info"]} <= known
