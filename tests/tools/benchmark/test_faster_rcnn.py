"""Tests of the training of torchvision's Faster R-CNN."""

import json

import numpy as np
import pytest
import torch
from helpers.clocks import Clock
from PIL import Image
from pycocotools.coco import COCO
from torchvision.models import resnet18
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

from vitkit.tools.benchmark import faster_rcnn


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Let a step take a second, and all else no time."""
    clock, step = Clock(), torch.optim.SGD.step
    monkeypatch.setattr(faster_rcnn, "time", clock)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *a: (clock.sleep(1.0), step(self, *a)))
    return clock


@pytest.fixture
def root(tmp_path):
    """Two images, the second of which has no boxes, with category ids that do not start at 1."""
    (tmp_path / "images").mkdir()
    (tmp_path / "annotations").mkdir()
    images = [dict(id=number, file_name=f"{number}.png", height=48, width=64) for number in (5, 9)]
    for image in images:
        Image.fromarray(np.full((48, 64, 3), 100, np.uint8)).save(tmp_path / "images" / image["file_name"])
    annotations = [dict(id=1, image_id=5, category_id=7, bbox=[8, 8, 32, 24], area=768, iscrowd=0)]
    categories = [dict(id=7, name="cell"), dict(id=12, name="other")]
    for part in ("train", "val"):
        text = json.dumps(dict(images=images, annotations=annotations, categories=categories))
        (tmp_path / f"annotations/instances_{part}.json").write_text(text)
    return tmp_path


def test_images_without_boxes_are_trained_on(root, capsys):
    faster_rcnn.main([str(root), "--minutes", "0.001", "--size", "48"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["steps"] == 1 and 0 <= result["AP"] <= 1


def test_average_precision_of_no_and_of_perfect_detections(root):
    coco = COCO(root / "annotations/instances_val.json")
    assert faster_rcnn.average_precision(coco, []) == (0, 0)
    perfect = dict(image_id=5, category_id=7, bbox=[8.0, 8.0, 32.0, 24.0], score=0.9)
    assert faster_rcnn.average_precision(coco, [perfect]) == pytest.approx((1, 1))


def test_interrupted_run_is_continued_and_a_finished_one_is_not_repeated(root, tmp_path, monkeypatch, capsys):
    def run(minutes="0.001"):
        faster_rcnn.main([str(root), "--minutes", minutes, "--size", "48", "--run-dir", str(tmp_path / "run")])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    def build(args, num_classes):
        head, predictor = TwoMLPHead(256 * 7 * 7, 8), FastRCNNPredictor(8, num_classes)
        backbone = faster_rcnn._resnet_fpn_extractor(resnet18(weights=None), trainable_layers=5)
        return FasterRCNN(backbone, box_head=head, box_predictor=predictor, min_size=48, max_size=96)

    monkeypatch.setattr(faster_rcnn, "build", build)
    monkeypatch.setattr(faster_rcnn, "SECONDS_BETWEEN_STATES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(faster_rcnn, "average_precision", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    state = faster_rcnn.read_checkpoint(tmp_path / "run/state.pth")
    assert state["steps"] == 1 and state["spent"] == 1.0
    result = run()  # its time is spent: only the evaluation is missing
    assert result["steps"] == 1 and result["processor_minutes"] == pytest.approx(1 / 60, abs=1e-4)
    assert not (tmp_path / "run/state.pth").exists()
    assert run("100") == result
