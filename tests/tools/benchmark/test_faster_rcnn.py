"""Tests of the training of torchvision's Faster R-CNN."""

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from vitkit.tools.benchmark import faster_rcnn


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
