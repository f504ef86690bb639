import copy
import json

import numpy as np
import pytest
from helpers.federated import federated_results, federated_truth
from helpers.plain_dataset import PlainDataset

from vitkit.errors import DataError
from vitkit.evaluation import lvis
from vitkit.evaluation.lvis import LvisEvaluator

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "APr", "APc", "APf")


def dataset_of(truth):
    annotations = [{"iscrowd": 0, **annotation} for annotation in truth["annotations"]]
    return PlainDataset(
        annotations=["objects"],
        classes=[category["name"] for category in truth["categories"]],
        category_ids=[category["id"] for category in truth["categories"]],
        image_ids=[image["id"] for image in truth["images"]],
        ground_truth=lambda: copy.deepcopy({**truth, "annotations": annotations}),
    )


def evaluate(truth, results, tmp_path, **options):
    evaluator = LvisEvaluator(dataset_of(truth), **options)
    (tmp_path / "results.json").write_text(json.dumps(results))
    evaluator.load_results(tmp_path / "results.json")
    return evaluator, evaluator.compute()


@pytest.mark.parametrize(("iou_type", "per_image"), [("bbox", 40), ("segm", 40), ("bbox", 340)])
def test_metrics_are_those_of_the_lvis_package(iou_type, per_image, tmp_path, monkeypatch):
    package = pytest.importorskip("lvis", reason="pip install lvis")
    monkeypatch.setattr(np, "float", float, raising=False)  # which the package uses and NumPy 2 has no more
    truth = federated_truth(num_images=30 if per_image < 300 else 3)
    results = federated_results(truth, per_image=per_image)
    _, metrics = evaluate(truth, results, tmp_path, iou_types=["bbox", "segm"])
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    if iou_type == "segm":  # with a box, the package would take its area for that of the mask
        results = [{k: v for k, v in result.items() if k != "bbox"} for result in results]
    theirs = package.LVISEval(str(tmp_path / "truth.json"), copy.deepcopy(results), iou_type)
    theirs.run()
    expected = {name: theirs.results[name] for name in NAMES}
    expected["AR300"] = theirs.results["AR@300"]
    expected |= {f"AR{size}": theirs.results[f"AR{size}@300"] for size in "sml"}
    assert {name: metrics[f"{iou_type}/{name}"] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert len({round(value, 6) for value in expected.values()}) > 9


def test_fixed_ap_is_that_of_the_lvis_package_for_the_best_predictions_of_each_class(tmp_path, monkeypatch):
    package = pytest.importorskip("lvis", reason="pip install lvis")
    monkeypatch.setattr(np, "float", float, raising=False)
    monkeypatch.setattr(lvis, "PER_CLASS", 50)
    truth = federated_truth(num_images=3)
    results = federated_results(truth, per_image=340)
    evaluator, metrics = evaluate(truth, results, tmp_path, fixed_ap=True)
    best = []
    for category in truth["categories"]:
        of_class = [result for result in results if result["category_id"] == category["id"]]
        best += sorted(of_class, key=lambda result: -result["score"])[:50]
    assert len(evaluator.results()) == len(best) < len(results)
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    ground_truth = package.LVIS(str(tmp_path / "truth.json"))
    theirs = package.LVISEval(ground_truth, package.LVISResults(ground_truth, copy.deepcopy(best), max_dets=-1), "bbox")
    theirs.run()
    expected = {name: theirs.results[name] for name in NAMES}
    assert {name: metrics[f"bbox/{name}"] for name in NAMES} == pytest.approx(expected, abs=1e-12)


GOLDEN = {
    "bbox": [0.407546, 0.686803, 0.40601, 0.223682, 0.549286, 0.843442, 0.414299, 0.371317, 0.437021],
    "segm": [0.409702, 0.691439, 0.415582, 0.225554, 0.554449, 0.830381, 0.410424, 0.372159, 0.446523],
}


def test_metrics_equal_recorded_ones_of_the_lvis_package(tmp_path):
    # lvis 0.5.3, which the tests above run where it is installed.
    truth = federated_truth()
    _, metrics = evaluate(truth, federated_results(truth), tmp_path, iou_types=["bbox", "segm"])
    for iou_type, expected in GOLDEN.items():
        assert [metrics[f"{iou_type}/{name}"] for name in NAMES] == pytest.approx(expected, abs=1e-6)


def one_image(results, **image):
    fields = dict(id=1, width=100, height=100, neg_category_ids=[], not_exhaustive_category_ids=[])
    box = [10, 10, 50, 50]
    truth = dict(
        images=[fields | image],
        annotations=[dict(id=1, image_id=1, category_id=2, bbox=box, area=2500)],
        categories=[dict(id=1, name="cat", frequency="r"), dict(id=2, name="dog", frequency="f")],
    )
    return truth, [dict(image_id=1, **result) for result in results]


RIGHT = dict(category_id=2, bbox=[10, 10, 50, 50], score=0.5)
ELSEWHERE = dict(category_id=2, bbox=[60, 60, 20, 20], score=0.9)


@pytest.mark.parametrize(
    ("results", "image", "expected"),
    [
        ([RIGHT], {}, 1.0),
        ([RIGHT, ELSEWHERE], {}, 0.5),  # the better scored prediction is wrong
        ([RIGHT, ELSEWHERE], dict(not_exhaustive_category_ids=[2]), 1.0),  # it may be a dog that is not annotated
    ],
)
def test_unmatched_predictions_count_only_where_all_objects_are_annotated(results, image, expected, tmp_path):
    _, metrics = evaluate(*one_image(results, **image), tmp_path)
    assert metrics["bbox/AP"] == metrics["bbox/APf"] == pytest.approx(expected)
    assert metrics["bbox/APr"] == -1  # no cat


def test_predictions_of_classes_that_an_image_is_not_annotated_for_are_not_counted(tmp_path):
    truth, results = one_image([RIGHT, dict(RIGHT, category_id=1, score=0.9)])
    evaluator, _ = evaluate(truth, results, tmp_path)
    assert len(evaluator.statistics().ranking(0, 0).scores) == 0
    truth["images"][0]["neg_category_ids"] = [1]
    evaluator, _ = evaluate(truth, results, tmp_path)
    assert evaluator.statistics().ranking(0, 0).correct.tolist() == [False]


def test_only_300_predictions_of_an_image_count_unless_ap_is_fixed(tmp_path):
    truth, results = one_image([dict(RIGHT, category_id=1, score=0.9)] * 300 + [RIGHT])
    evaluator, metrics = evaluate(truth, results, tmp_path)
    assert metrics["bbox/AP"] == 0
    assert "at most 300 detections in an image count" in evaluator.table()
    evaluator, metrics = evaluate(truth, results, tmp_path, fixed_ap=True)
    assert metrics["bbox/AP"] == pytest.approx(1)
    assert "at most 10000 detections of a class in all images count" in evaluator.table()
    assert "bbox/APf 1" in evaluator.table()


def test_metrics_at_another_iou_are_of_the_same_predictions(tmp_path):
    truth, results = one_image([RIGHT, dict(RIGHT, category_id=1, score=0.9)])
    evaluator, _ = evaluate(truth, results, tmp_path, iou=0.3)
    assert [len(ranking.scores) for ranking in evaluator.statistics().rankings()] == [0, 1]


def test_dataset_without_lists_of_annotated_classes_is_an_error():
    truth, _ = one_image([])
    del truth["images"][0]["neg_category_ids"]
    with pytest.raises(DataError, match="'images' has no 'neg_category_ids'"):
        LvisEvaluator(dataset_of(truth)).check_dataset()
