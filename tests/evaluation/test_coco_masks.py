"""Mask AP: equal to pycocotools' own reading of the results file, with run lengths made per batch."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit.data.shapes import ShapesSegmentation
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.coco import METRICS, CocoEvaluator, masks_to_rle
from vitkit.ops.masks import boxes_around_masks
from vitkit.registry import EVALUATORS


@pytest.fixture(scope="module")
def dataset():
    return ShapesSegmentation(6, task="instance", image_size=64)


def shifted(dataset, index, by):
    """The true masks moved to the right, with scores that fall from object to object."""
    target = dataset[index]["target"]
    masks = torch.roll(target["masks"], by, dims=2)
    scores = torch.linspace(0.9, 0.3, len(masks)) - 0.01 * index
    return dict(labels=target["labels"], scores=scores, masks=masks, boxes_xyxy=boxes_around_masks(masks)), target


def run(dataset, by, **arguments):
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator", **arguments), dataset=dataset)
    for index in range(len(dataset)):
        prediction, target = shifted(dataset, index, by)
        evaluator.update([prediction], [target])
    evaluator.gather()
    return evaluator, evaluator.compute()


def test_run_lengths_equal_pycocotools_own():
    masks = torch.rand(37, 21, 30) < 0.3
    expected = coco_mask.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy().view(np.uint8)))
    assert masks_to_rle(masks) == [{"size": [21, 30], "counts": rle["counts"].decode()} for rle in expected]
    assert masks_to_rle(masks[:0]) == []


def test_perfect_masks_score_one(dataset):
    evaluator, metrics = run(dataset, 0, iou_types=["segm"])
    assert list(metrics) == [f"segm/{name}" for name in METRICS]
    assert metrics["segm/AP"] == metrics["segm/AR100"] == 1.0
    assert len(evaluator.table().splitlines()) == 12


def test_numbers_equal_pycocotools_own_reading_of_the_results_file(dataset, tmp_path, capsys):
    evaluator, metrics = run(dataset, 3, iou_types=["bbox", "segm"])
    assert 0 < metrics["segm/AP"] < 1
    assert evaluator.table().splitlines()[0] == "boxes:" and evaluator.table().splitlines()[13] == "masks:"
    evaluator.write_results(tmp_path / "results.json")
    (tmp_path / "truth.json").write_text(json.dumps(dataset.ground_truth()))
    coco = COCO(str(tmp_path / "truth.json"))
    stats = {}
    for iou_type in ("bbox", "segm"):
        evaluation = COCOeval(coco, coco.loadRes(str(tmp_path / "results.json")), iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        stats |= {f"{iou_type}/{name}": value for name, value in zip(METRICS, evaluation.stats)}
    # pycocotools takes the area of a result with boxes and masks from the box, which decides small, medium and large.
    same = [key for key in metrics if key[-1] not in "sml" or key.startswith("bbox")]
    assert {key: metrics[key] for key in same} == {key: stats[key] for key in same}
    assert evaluator.per_class().keys() == set(dataset.classes)


def test_written_results_score_the_same(dataset, tmp_path):
    evaluator, expected = run(dataset, 3, iou_types=["bbox", "segm"])
    evaluator.write_results(tmp_path / "results.json")
    again = CocoEvaluator(dataset, iou_types=["bbox", "segm"])
    again.load_results(tmp_path / "results.json")
    assert again.compute() == expected


def test_wrong_results_are_errors(dataset, tmp_path):
    path = tmp_path / "results.json"
    evaluator = CocoEvaluator(dataset)
    with pytest.raises(DataError, match="cannot read"):
        evaluator.load_results(path)
    path.write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        evaluator.load_results(path)
    good = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2], "score": 0.5}
    path.write_text(json.dumps([good]))
    with pytest.raises(DataError, match="each with category_id, image_id, score, segmentation"):
        CocoEvaluator(dataset, iou_types=["segm"]).load_results(path)
    path.write_text(json.dumps([good, {**good, "image_id": 77}]))
    with pytest.raises(DataError, match="1 of 2 predictions have a image_id .* dataset's 6 images, such as 77"):
        evaluator.load_results(path)
    path.write_text(json.dumps([good, {**good, "category_id": 77}]))
    with pytest.raises(DataError, match="1 of 2 predictions have a category_id .* dataset's 6 classes, such as 77"):
        evaluator.load_results(path)


def test_a_model_without_masks_is_an_error(dataset):
    prediction, target = shifted(dataset, 0, 0)
    del prediction["masks"]
    with pytest.raises(ConfigError, match="the model predicts no masks: it returns labels, scores, boxes_xyxy"):
        CocoEvaluator(dataset, iou_types=["segm"]).update([prediction], [target])


def test_truth_without_masks_is_an_error():
    annotation = dict(id=4, image_id=1, category_id=1, bbox=[0, 0, 5, 5], area=25, iscrowd=0)
    truth = dict(images=[dict(id=1, width=9, height=9)], annotations=[annotation], categories=[dict(id=1, name="cell")])
    dataset = SimpleNamespace(classes=["cell"], category_ids=[1], image_ids=[1], ground_truth=lambda: truth)
    with pytest.raises(DataError, match=r"1 of 1 annotations have no segmentation, such as 4 \(image 1\)"):
        CocoEvaluator(dataset, iou_types=["segm"]).compute()
