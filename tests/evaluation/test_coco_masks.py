"""Mask AP equals that of pycocotools reading the results file, with run lengths made per batch."""

import json

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit.data.synthetic.shapes import ShapesSegmentation
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.coco import CocoEvaluator, masks_to_rle, metric_names
from vitkit.ops.masks import boxes_around_masks
from vitkit.registry import EVALUATORS


@pytest.fixture(scope="module")
def dataset():
    return ShapesSegmentation(6, image_size=64, task="instance")


def shifted(dataset, index, by):
    """Return the true masks moved to the right, with scores that decrease from object to object."""
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


def test_run_lengths_equal_those_of_pycocotools():
    masks = torch.rand(37, 21, 30) < 0.3
    expected = coco_mask.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy().view(np.uint8)))
    assert masks_to_rle(masks) == [{"size": [21, 30], "counts": rle["counts"].decode()} for rle in expected]
    assert masks_to_rle(masks[:0]) == []


def test_perfect_masks_score_one(dataset):
    evaluator, metrics = run(dataset, 0, iou_types=["segm"])
    assert list(metrics) == [f"segm/{name}" for name in metric_names()]
    assert metrics["segm/AP"] == metrics["segm/AR100"] == 1.0
    assert evaluator.table().splitlines()[2].split()[:2] == ["masks", "1.000"]


def test_metrics_equal_those_of_pycocotools_on_the_results_file(dataset, tmp_path, capsys):
    evaluator, metrics = run(dataset, 3, iou_types=["bbox", "segm"])
    assert 0 < metrics["segm/AP"] < 1
    assert [line.split()[0] for line in evaluator.table().splitlines()[1:]] == ["AP", "boxes", "masks"]
    evaluator.write_results(tmp_path / "results.json")
    (tmp_path / "truth.json").write_text(json.dumps(dataset.ground_truth()))
    coco = COCO(str(tmp_path / "truth.json"))
    stats = {}
    for iou_type in ("bbox", "segm"):
        evaluation = COCOeval(coco, coco.loadRes(str(tmp_path / "results.json")), iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        stats |= {f"{iou_type}/{name}": value for name, value in zip(metric_names(), evaluation.stats)}
    # pycocotools takes the area of a result with boxes and masks from the box, which decides small, medium and large.
    same = [key for key in metrics if key[-1] not in "sml" or key.startswith("bbox")]
    assert {key: metrics[key] for key in same} == {key: stats[key] for key in same}
    assert evaluator.per_class().keys() == set(dataset.classes)


def test_written_results_score_the_same_when_read_back(dataset, tmp_path):
    evaluator, expected = run(dataset, 3, iou_types=["bbox", "segm"])
    evaluator.write_results(tmp_path / "results.json")
    again = CocoEvaluator(dataset, iou_types=["bbox", "segm"])
    again.load_results(tmp_path / "results.json")
    assert again.compute() == expected


def test_results_for_a_part_of_the_images_warn(dataset, tmp_path, caplog):
    evaluator, _ = run(dataset, 3)
    evaluator.write_results(tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    first = results[0]["image_id"]
    (tmp_path / "results.json").write_text(json.dumps([r for r in results if r["image_id"] == first]))
    CocoEvaluator(dataset).load_results(tmp_path / "results.json")
    count = len(dataset.image_ids)
    assert f"no prediction for {count - 1} of {count} images, whose objects count as missed" in caplog.text


def test_wrong_results_are_errors(dataset, tmp_path):
    path = tmp_path / "results.json"
    evaluator = CocoEvaluator(dataset)
    with pytest.raises(DataError, match="results: no file"):
        evaluator.load_results(path)
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON at line 1"):
        evaluator.load_results(path)
    good = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 2, 2], "score": 0.5}
    path.write_text(json.dumps([good]))
    with pytest.raises(DataError, match="entry 0 has no 'segmentation'; expected run lengths"):
        CocoEvaluator(dataset, iou_types=["segm"]).load_results(path)
    path.write_text(json.dumps([good, {**good, "image_id": 77}]))
    with pytest.raises(DataError, match="1 of their 2 images are among the 6 of the data, not 77."):
        evaluator.load_results(path)
    path.write_text(json.dumps([good, {**good, "category_id": 77}]))
    with pytest.raises(
        DataError, match="entry 1 has category_id 77; expected one of the 6 category_ids of the dataset"
    ):
        evaluator.load_results(path)


SIZE = [30, 40]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "0.5"}, "score '0.5'; expected a finite number"),
        ({"score": float("nan")}, "score nan; expected a finite number"),
        ({"score": True}, "score True; expected a finite number"),
        ({"bbox": [0, 0, None, 2]}, r"bbox \[0, 0, None, 2\]; expected four finite numbers"),
        ({"image_id": True}, "image_id True; expected one of"),
        ({"segmentation": [[0, 0, 9, 0, 9, 9]]}, "expected run lengths"),
        ({"segmentation": {"size": SIZE, "counts": [0.5, 1199.5]}}, "whole numbers above 0"),
        ({"segmentation": {"size": SIZE, "counts": [2**40, -(2**40) + 1200]}}, "whole numbers above 0"),
        ({"segmentation": {"size": SIZE, "counts": [1199]}}, "fill the image's 1200 pixels; their sum is 1199"),
        ({"segmentation": {"size": SIZE, "counts": "oo"}}, "it ends within a number"),
        ({"segmentation": {"size": [2**20, 2**20], "counts": [2**40]}}, "a size"),
    ],
)
def test_wrong_values_of_results_are_named(dataset, tmp_path, change, message):
    good = {"image_id": 1, "category_id": 1, "score": 0.5, "segmentation": {"size": SIZE, "counts": [1200]}}
    (tmp_path / "results.json").write_text(json.dumps([good, {**good, **change}]))
    with pytest.raises(DataError, match=f"results.json': entry 1 has .*{message}"):
        CocoEvaluator(dataset, iou_types=["segm"]).load_results(tmp_path / "results.json")


@pytest.mark.parametrize("compressed", [True, False])
def test_masks_of_another_size_than_their_image_are_an_error(dataset, tmp_path, compressed):
    """pycocotools would never finish comparing them."""
    counts = coco_mask.encode(np.ones((7, 5), np.uint8, order="F"))["counts"].decode() if compressed else [0, 35]
    result = {"image_id": 1, "category_id": 1, "score": 0.5, "segmentation": {"size": [7, 5], "counts": counts}}
    (tmp_path / "results.json").write_text(json.dumps([result]))
    evaluator = CocoEvaluator(dataset, iou_types=["segm"])
    evaluator.load_results(tmp_path / "results.json")
    with pytest.raises(DataError, match=r"image 1: a predicted mask has the size \[7, 5\], .*that of the image"):
        evaluator.compute()


def test_uncompressed_run_lengths_score_as_compressed_ones(dataset, tmp_path):
    truth = dataset.ground_truth()
    image, annotation = truth["images"][0], next(a for a in truth["annotations"] if not a["iscrowd"])
    image = next(i for i in truth["images"] if i["id"] == annotation["image_id"])
    height, width = image["height"], image["width"]
    flat = coco_mask.decode(annotation["segmentation"]).T.ravel()
    changes = [0, *(np.flatnonzero(np.diff(flat)) + 1), height * width]
    runs = [*([0] if flat[0] else []), *np.diff(changes).tolist()]
    metrics = []
    for counts in (runs, annotation["segmentation"]["counts"]):
        result = {"image_id": image["id"], "category_id": annotation["category_id"], "score": 0.5}
        result["segmentation"] = {"size": [height, width], "counts": counts}
        (tmp_path / "results.json").write_text(json.dumps([result]))
        evaluator = CocoEvaluator(dataset, iou_types=["segm", "bbox"])
        evaluator.load_results(tmp_path / "results.json")
        metrics.append(evaluator.compute())
    assert metrics[0] == metrics[1] and metrics[0]["segm/AP"] > 0


def test_a_model_without_masks_is_an_error(dataset):
    prediction, target = shifted(dataset, 0, 0)
    del prediction["masks"]
    with pytest.raises(ConfigError, match="the model predicts no masks: it returns labels, scores, boxes_xyxy"):
        CocoEvaluator(dataset, iou_types=["segm"]).update([prediction], [target])


def test_ground_truth_without_masks_is_an_error():
    annotation = dict(id=4, image_id=1, category_id=1, bbox=[0, 0, 5, 5], area=25, iscrowd=0)
    truth = dict(images=[dict(id=1, width=9, height=9)], annotations=[annotation], categories=[dict(id=1, name="cell")])
    dataset = PlainDataset(
        annotations=["objects"], classes=["cell"], category_ids=[1], image_ids=[1], ground_truth=lambda: truth
    )
    with pytest.raises(DataError, match=r"1 of 1 annotations have no segmentation, such as 4 \(image 1\)"):
        CocoEvaluator(dataset, iou_types=["segm"]).compute()
