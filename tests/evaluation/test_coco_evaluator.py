import json

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit import distributed
from vitkit.apps.report.matching import compute_overlaps, match_detections
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import base as base_module
from vitkit.evaluation.coco import CocoEvaluator, metric_names
from vitkit.evaluation.detection_statistics import Ranking
from vitkit.evaluation.score_thresholds import compute_threshold_rows, find_best_row
from vitkit.registry import EVALUATORS
from vitkit.structures import ScoreThresholds

CATEGORY_IDS = [3, 90, 7]  # with gaps, and not in order
CLASSES = ["cat", "kite", "dog"]
LARGE = [10.0, 20.0, 100.0, 120.0]  # xywh


def annotation(id, image_id, category_id, bbox, iscrowd=0):
    return dict(
        id=id,
        image_id=image_id,
        category_id=category_id,
        bbox=bbox,
        area=bbox[2] * bbox[3],
        iscrowd=iscrowd,
        segmentation=[],
    )


def dataset_of(annotations, image_ids=(11, 5, 12)):
    images = [dict(id=i, file_name=f"{i}.jpg", width=640, height=480) for i in image_ids]
    categories = [dict(id=i, name=name) for i, name in zip(CATEGORY_IDS, CLASSES)]
    return PlainDataset(
        annotations=["objects"],
        classes=CLASSES,
        category_ids=CATEGORY_IDS,
        image_ids=image_ids,
        ground_truth=lambda: dict(images=images, annotations=annotations, categories=categories),
    )


@pytest.fixture
def dataset():
    return dataset_of(
        [
            annotation(0, 11, 3, LARGE),
            annotation(1, 11, 90, [200.0, 200.0, 20.0, 20.0]),
            annotation(2, 5, 7, [50.0, 60.0, 50.0, 40.0]),
            annotation(3, 5, 7, [300.0, 100.0, 200.0, 200.0]),
            annotation(4, 12, 3, [0.0, 0.0, 300.0, 300.0], iscrowd=1),
        ]
    )


def detections(rows):
    """Return detections from rows of (label, xywh, score)."""
    labels, boxes, scores = zip(*rows) if rows else ((), (), ())
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
    return dict(
        labels=torch.tensor(labels, dtype=torch.int64),
        boxes_xyxy=boxes,
        scores=torch.tensor(scores, dtype=torch.float32),
    )


def perfect(dataset):
    """Return image id -> detections equal to the objects."""
    rows = {image_id: [] for image_id in dataset.image_ids}
    for a in dataset.ground_truth()["annotations"]:
        if not a["iscrowd"]:
            rows[a["image_id"]].append((CATEGORY_IDS.index(a["category_id"]), a["bbox"], 0.9))
    return {image_id: detections(found) for image_id, found in rows.items()}


def noisy(dataset, seed=0):
    """Return image id -> shifted objects and some false detections."""
    rng = np.random.default_rng(seed)
    rows = {image_id: [] for image_id in dataset.image_ids}
    for a in dataset.ground_truth()["annotations"] * 2:
        box = (np.array(a["bbox"]) + rng.normal(0, 6, 4)).clip(1)
        rows[a["image_id"]].append((CATEGORY_IDS.index(a["category_id"]), box.tolist(), float(rng.random())))
    for _ in range(10):
        image_id = int(rng.choice(dataset.image_ids))
        rows[image_id].append((int(rng.integers(3)), rng.uniform(10, 200, 4).tolist(), float(rng.random())))
    return {image_id: detections(found) for image_id, found in rows.items()}


def run(evaluator, predictions):
    for image_id, prediction in predictions.items():
        evaluator.update([prediction], [dict(image_id=image_id)])
    evaluator.gather()
    return evaluator.compute()


def test_perfect_predictions_score_one(dataset):
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator", iou_types=["bbox"]), dataset=dataset)
    metrics = run(evaluator, perfect(dataset))
    assert list(metrics) == [f"bbox/{name}" for name in metric_names()]
    # One box per image can detect only one of the two dogs.
    assert metrics == pytest.approx({f"bbox/{name}": 1.0 for name in metric_names()} | {"bbox/AR1": (1 + 1 + 0.5) / 3})
    assert evaluator.per_class() == pytest.approx({"cat": 1.0, "kite": 1.0, "dog": 1.0})


def test_the_mean_of_a_group_of_classes_is_a_metric(dataset):
    groups = {"pets": ["dog", "cat"], "toys": ["kite"]}
    evaluator = CocoEvaluator(dataset, groups=groups)
    metrics = run(evaluator, noisy(dataset))
    by_class = evaluator.per_class()
    assert metrics["bbox/AP_pets"] == pytest.approx((by_class["dog"] + by_class["cat"]) / 2)
    assert metrics["bbox/AP_toys"] == pytest.approx(by_class["kite"]) != metrics["bbox/AP_pets"]
    assert metrics["bbox/AP"] == run(CocoEvaluator(dataset), noisy(dataset))["bbox/AP"]
    assert "bbox/AP_pets" in evaluator.table()
    with pytest.raises(ConfigError, match="groups.pets: the data have no class 'dgo'. Did you mean 'dog'"):
        CocoEvaluator(dataset, groups={"pets": ["dgo"]})
    with pytest.raises(ConfigError, match="groups.pets: has no classes"):
        CocoEvaluator(dataset, groups={"pets": []})


def test_metrics_of_a_case_by_hand():
    dataset = dataset_of([annotation(1, 11, 3, LARGE), annotation(2, 5, 3, LARGE)])
    shifted = [LARGE[0] + 20.0, *LARGE[1:]]  # IoU 80 / 120 = 0.667: right at 0.5, 0.55, 0.6 and 0.65
    evaluator = CocoEvaluator(dataset)
    metrics = run(evaluator, {11: detections([(0, LARGE, 0.9)]), 5: detections([(0, shifted, 0.8)])})
    # At thresholds where only the first is right, precision is 1 up to recall 0.5: 51 of 101 recall levels.
    assert metrics["bbox/AP"] == pytest.approx((4 * 1 + 6 * 51 / 101) / 10)
    assert metrics["bbox/AP50"] == pytest.approx(1.0)
    assert metrics["bbox/AP75"] == pytest.approx(51 / 101)
    assert metrics["bbox/AR100"] == pytest.approx((4 * 1 + 6 * 0.5) / 10)
    assert metrics["bbox/APs"] == -1  # there are no small objects
    assert evaluator.per_class() == pytest.approx({"cat": metrics["bbox/AP"], "kite": -1.0, "dog": -1.0})


def test_image_without_predictions_counts_as_missed():
    dataset = dataset_of([annotation(1, 11, 3, LARGE), annotation(2, 5, 3, LARGE)])
    metrics = run(CocoEvaluator(dataset), {11: detections([(0, LARGE, 0.9)])})
    assert metrics["bbox/AP"] == pytest.approx(51 / 101)


def test_no_predictions_score_zero(dataset):
    metrics = run(CocoEvaluator(dataset), {})
    assert set(metrics.values()) == {0.0}
    assert run(CocoEvaluator(dataset), {i: detections([]) for i in dataset.image_ids}) == metrics


def test_detection_of_a_crowd_is_ignored(dataset):
    predictions = perfect(dataset)
    evaluator = CocoEvaluator(dataset)
    in_crowd = [[0.0, 0.0, 300.0, 300.0], [10.0, 10.0, 60.0, 60.0]]
    predictions[12] = detections([(0, box, 0.99) for box in in_crowd])
    assert run(evaluator, predictions)["bbox/AP"] == pytest.approx(1.0)


def test_metrics_equal_those_of_pycocotools_on_the_results_file(dataset, tmp_path, capsys):
    evaluator = CocoEvaluator(dataset)
    metrics = run(evaluator, noisy(dataset))
    assert capsys.readouterr().out == ""
    assert 0 < metrics["bbox/AP"] < 1
    evaluator.write_results(tmp_path / "results.json")

    truth = dataset.ground_truth()
    truth["annotations"] = [{**a, "id": a["id"] + 1} for a in truth["annotations"]]  # COCOeval fails on id 0
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    coco = COCO(str(tmp_path / "truth.json"))
    evaluation = COCOeval(coco, coco.loadRes(str(tmp_path / "results.json")), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert list(metrics.values()) == evaluation.stats.tolist()
    _, names, numbers = (line.split() for line in evaluator.table().splitlines())
    assert names == list(metric_names()) and numbers[0] == "boxes"
    assert numbers[1:] == ["–" if value < 0 else f"{value:.3f}" for value in evaluation.stats]
    of_cats = evaluation.eval["precision"][:, :, 0, 0, -1]
    assert evaluator.per_class()["cat"] == pytest.approx(of_cats.mean())


def crowded(num_objects=180):
    """Return a dataset with one image full of cats, and noisy detections of them and more."""
    rng = np.random.default_rng(0)
    corners = [(x, y) for x in range(0, 600, 30) for y in range(0, 450, 30)][:num_objects]
    dataset = dataset_of([annotation(k, 11, 3, [x, y, 25.0, 25.0]) for k, (x, y) in enumerate(corners, start=1)])
    rows = [
        (0, [x + dx, y + dy, 25.0, 25.0], float(rng.random()))
        for x, y in corners
        for dx, dy in rng.normal(0, 3, (2, 2))
    ]
    return dataset, {image_id: detections(rows if image_id == 11 else []) for image_id in dataset.image_ids}


@pytest.mark.parametrize("max_dets", [100, 500, (1, 10, 100), [5, 50, 200]])
def test_each_limit_equals_pycocotools(max_dets, tmp_path):
    dataset, predictions = crowded()
    evaluator = EVALUATORS.build(dict(type="CocoEvaluator", max_dets=max_dets), dataset=dataset)
    metrics = run(evaluator, predictions)
    evaluator.write_results(tmp_path / "results.json")
    (tmp_path / "truth.json").write_text(json.dumps(dataset.ground_truth()))
    coco = COCO(str(tmp_path / "truth.json"))
    evaluation = COCOeval(coco, coco.loadRes(str(tmp_path / "results.json")), "bbox")
    limits = [1, 10, max_dets] if isinstance(max_dets, int) else list(max_dets)
    evaluation.params.maxDets = limits
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert list(metrics)[6:9] == [f"bbox/AR{limit}" for limit in limits]
    assert list(metrics.values())[1:] == evaluation.stats.tolist()[1:]
    precision = evaluation.eval["precision"][:, :, :, 0, 2]
    assert metrics["bbox/AP"] == precision[precision > -1].mean()
    # The bootstrap computes the same numbers.
    overall, _ = evaluator.statistics().scores(np.ones((1, 3)))
    assert {name: np.nan_to_num(value[0], nan=-1) for name, value in overall.items()} == pytest.approx(metrics)


def test_more_detections_raise_the_metrics_of_a_crowded_image():
    dataset, predictions = crowded()
    low, high = (run(CocoEvaluator(dataset, max_dets=limit), predictions) for limit in (100, 500))
    assert low["bbox/AR100"] < 100 / 180 < high["bbox/AR500"] and low["bbox/AP"] < high["bbox/AP"]


def test_table_states_the_limit_and_a_model_that_returns_fewer_detections():
    dataset, predictions = crowded()
    evaluator = CocoEvaluator(dataset, max_dets=500)
    run(evaluator, predictions)
    assert evaluator.table().splitlines()[0] == (
        "at most 500 detections of a class in an image count (max_dets); the model returns at most 360, of all classes "
        "(model.num_detections or num_queries)"
    )
    evaluator = CocoEvaluator(dataset)
    run(evaluator, predictions)
    assert evaluator.table().splitlines()[0] == "at most 100 detections of a class in an image count (max_dets)"


@pytest.mark.parametrize("max_dets", [10, 0, [10, 1, 100], [1, 100], [0, 10, 100]])
def test_limits_that_do_not_ascend_are_an_error(dataset, max_dets):
    with pytest.raises(ConfigError, match=r"got max_dets=.*expected one number above 10, such as 500, or three"):
        CocoEvaluator(dataset, max_dets=max_dets)


def test_results_contain_raw_ids_and_plain_numbers(dataset):
    evaluator = CocoEvaluator(dataset)
    evaluator.update([detections([(1, [1.5, 2.0, 3.0, 4.0], 0.5)])], [dict(image_id=2**40)])
    assert evaluator.results() == [{"image_id": 2**40, "category_id": 90, "bbox": [1.5, 2.0, 3.0, 4.0], "score": 0.5}]
    assert json.dumps(evaluator.results())


def test_two_ranks_equal_one_process_despite_a_repeated_image(dataset, monkeypatch):
    predictions = noisy(dataset)
    single = CocoEvaluator(dataset)
    expected = run(single, predictions)

    ranks = [CocoEvaluator(dataset), CocoEvaluator(dataset)]
    for position, image_id in enumerate([11, 5, 12, 11]):
        ranks[position % 2].update([predictions[image_id]], [dict(image_id=image_id)])
    answers = [rank.stored_predictions for rank in ranks]
    monkeypatch.setattr(distributed, "gather_objects", lambda item: answers if isinstance(item, dict) else [1])
    ranks[0].gather()
    assert ranks[0].compute() == expected
    assert ranks[0].results() == single.results()


def test_only_the_main_rank_computes_metrics(dataset, monkeypatch):
    evaluator = CocoEvaluator(dataset)
    monkeypatch.setattr(base_module, "gather_dicts", lambda answers: {})
    monkeypatch.setattr(base_module, "is_main", lambda: False)
    assert run(evaluator, perfect(dataset)) == {}
    assert evaluator.per_class() == {}
    assert evaluator.table() == ""


def test_repeated_image_in_one_process_counts_once(dataset):
    evaluator = CocoEvaluator(dataset)
    run(evaluator, noisy(dataset))
    once = evaluator.results()
    run(evaluator, noisy(dataset, seed=1))
    assert evaluator.results() == once


def test_evaluation_leaves_the_ground_truth_unchanged(dataset):
    before = json.dumps(dataset.ground_truth())
    run(CocoEvaluator(dataset), perfect(dataset))
    assert json.dumps(dataset.ground_truth()) == before


def test_label_outside_the_classes_is_an_error(dataset):
    with pytest.raises(DataError, match="image 11: predicted labels 0 to 3, but the dataset has 3 classes"):
        CocoEvaluator(dataset).update([detections([(0, LARGE, 0.5), (3, LARGE, 0.5)])], [dict(image_id=11)])


def test_unknown_iou_type_is_an_error(dataset):
    with pytest.raises(ConfigError, match=r"iou_types=\['boxes'\]; expected 'bbox', 'segm', 'keypoints' or several"):
        CocoEvaluator(dataset, iou_types=["boxes"])


def test_thresholds_maximize_f1_per_class_and_overall():
    rng = np.random.default_rng(0)
    annotations, predictions = [], []
    for image_id in (11, 5, 12):
        boxes = rng.uniform(0, 300, (8, 2)).round()
        for number, corner in enumerate(boxes):
            category = CATEGORY_IDS[number % 3]
            annotations.append(annotation(0, image_id, category, [*corner, 40.0, 40.0], iscrowd=int(number == 7)))
        corners = torch.tensor(np.concatenate([boxes + rng.uniform(-9, 9, boxes.shape), rng.uniform(0, 300, (9, 2))]))
        labels = torch.tensor([k % 3 for k in range(8)] + [k % 2 for k in range(9)])
        scores = torch.tensor(rng.uniform(0, 1, 17)) * torch.tensor([1.0] * 8 + [0.7] * 9)
        boxes_xyxy = torch.cat([corners, corners + 40], dim=1)
        predictions.append(dict(labels=labels, scores=scores.float(), boxes_xyxy=boxes_xyxy.float()))
    for k, source in enumerate(annotations):
        source["id"] = k
    dataset = dataset_of(annotations)
    evaluator = CocoEvaluator(dataset)
    evaluator.update(predictions, [dict(image_id=i) for i in (11, 5, 12)])
    evaluator.gather()
    assert evaluator.score_thresholds() is None  # before they are computed
    evaluator.compute()
    found = evaluator.score_thresholds()
    truth, results = dataset.ground_truth(), evaluator.results()
    rankings = [independent_ranking(truth, results, category_id) for category_id in CATEGORY_IDS]
    best = find_best_row(rankings)
    scores = sorted(result["score"] for result in results)
    below = [score for score in scores if score < best.threshold]
    assert found.overall == pytest.approx((best.threshold + below[-1]) / 2)
    (row,) = compute_threshold_rows(rankings, [found.overall])
    assert row.f1 == best.f1 > 0.3
    for ranking, threshold in zip(rankings, found.by_class):
        (row,) = compute_threshold_rows([ranking], [threshold])
        assert row.f1 == find_best_row([ranking]).f1


def independent_ranking(truth, results, category_id):
    """Return the ranking of a class by vitkit's own matching, without COCOeval."""
    scores, right, num_objects = [], [], []
    for image in truth["images"]:
        predictions, objects = (
            [e for e in entries if (e["image_id"], e["category_id"]) == (image["id"], category_id)]
            for entries in (results, truth["annotations"])
        )
        overlaps, crowd = compute_overlaps(predictions, objects, "bbox", (0, 0))
        matched = match_detections(overlaps, [p["score"] for p in predictions], crowd)
        counted = [(p["score"], m >= 0) for p, m in zip(predictions, matched) if m < 0 or not crowd[m]]
        scores += [score for score, _ in counted]
        right += [is_right for _, is_right in counted]
        num_objects.append(float((~crowd).sum()))
    return Ranking(np.array(scores), np.zeros(len(scores), int), np.array(right, bool), np.array(num_objects))


def test_class_without_correct_detections_has_no_own_threshold(dataset):
    box = torch.tensor([[10.0, 20.0, 110.0, 140.0]])
    evaluator = CocoEvaluator(dataset)
    evaluator.update([dict(labels=torch.tensor([0]), scores=torch.tensor([0.25]), boxes_xyxy=box)], [dict(image_id=11)])
    evaluator.gather()
    evaluator.compute()
    assert evaluator.score_thresholds() == ScoreThresholds(0.125, (0.125, None, None), "highest F1")
    combined = EVALUATORS.build("CombinedEvaluator", dataset=dataset, evaluator=["CocoEvaluator"])
    assert combined.score_thresholds() is None
    wrong = CocoEvaluator(dataset)
    wrong.update([dict(labels=torch.tensor([1]), scores=torch.tensor([0.25]), boxes_xyxy=box)], [dict(image_id=11)])
    wrong.compute()
    assert wrong.score_thresholds() is None


def test_what_the_data_can_measure_is_known_before_training(dataset):
    evaluator = CocoEvaluator(dataset)
    assert all(evaluator.measures(f"bbox/{name}") for name in evaluator.metric_names)
    assert evaluator.measures("PQ") and evaluator.measures("loss")  # of others
    for wrong in ("bbox/ap50", "segm/AP50"):
        with pytest.raises(ConfigError, match=rf"{wrong}: is no metric of CocoEvaluator with iou_types=.*Did you"):
            evaluator.measures(wrong)
    large = CocoEvaluator(dataset_of([annotation(0, 11, 3, LARGE), annotation(1, 5, 3, [0, 0, 5, 5], iscrowd=1)]))
    assert {name for name in large.metric_names if large.measures(f"bbox/{name}")} == {
        *("AP", "AP50", "AP75", "APl", "AR1", "AR10", "AR100", "ARl")
    }
    combined = EVALUATORS.build(
        dict(type="CombinedEvaluator", evaluator=[dict(type="CocoEvaluator")]), dataset=dataset_of([])
    )
    assert not combined.measures("bbox/AP") and combined.measures("PQ")
    specs = [dict(type="CocoEvaluator"), dict(type="CocoEvaluator", max_dets=[1, 10, 300])]
    both = EVALUATORS.build(dict(type="CombinedEvaluator", evaluator=specs), dataset=dataset)
    assert both.measures("bbox/AR100") and both.measures("bbox/AR300")  # of one of them each
    with pytest.raises(ConfigError, match="segm/AP: is no metric of CocoEvaluator"):
        both.measures("segm/AP")
    assert set(combined.compute().values()) == {-1.0}
