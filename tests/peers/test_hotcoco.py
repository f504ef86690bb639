"""Evaluators, kinds of errors, calibration, intervals and label errors beside hotcoco (Rust, MIT) on random cases."""

import contextlib
import copy
import io
import json

import numpy as np
import pytest
import torch
from helpers.federated import federated_results, federated_truth
from helpers.plain_dataset import PlainDataset
from peers.coco_cases import CASES, Case, metrics_of, random_case
from peers.panoptic_cases import CATEGORY_IDS, THINGS, perturbed, random_truth, write_panoptic
from peers.panoptic_cases import dataset_of as panoptic_dataset
from peers.panoptic_cases import evaluate as panoptic_qualities

from vitkit.apps.report import comparison
from vitkit.apps.report.comparison import Compared, compare
from vitkit.apps.report.error_breakdown import KINDS, ErrorBreakdown
from vitkit.apps.report.intervals import bootstrap_weights
from vitkit.apps.report.label_errors import find_label_errors
from vitkit.apps.report.pages.coco import CALIBRATED, counts_by_score
from vitkit.apps.report.sections import expected_calibration_error
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.lvis import LvisEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator

hotcoco = pytest.importorskip("hotcoco")

pytestmark = pytest.mark.peers

MORE_CASES = {
    **CASES,
    "classes without objects": dict(num_classes=30, objects=3, num_images=10),
    "many classes": dict(num_classes=80, objects=40, num_images=12, crowds=0.1, ties=True),
    "one image": dict(num_images=1, num_classes=1),
}
NAMES = {
    **{"class": "Cls", "localization": "Loc", "both": "Both"},
    **{"duplicate": "Dupe", "background": "Bkg", "missed": "Miss"},
}
"""vitkit's kinds of errors -> TIDE's."""


def evaluation_of(case, iou_type="bbox", results=None, **params):
    truth = hotcoco.COCO(case.truth)
    evaluation = hotcoco.COCOeval(
        truth, truth.load_res(case.results(iou_type) if results is None else results), iou_type
    )
    settings = evaluation.params
    for name, value in params.items():
        setattr(settings, name, value)
    evaluation.params = settings
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.run()
    return evaluation


def evaluator_of(case, predictions=None):
    evaluator = CocoEvaluator(case.dataset)
    for image_id, prediction in (predictions or case.predictions).items():
        evaluator.update([prediction], [dict(image_id=image_id)])
    evaluator.gather()
    evaluator.compute()
    return evaluator


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("name", MORE_CASES)
def test_twelve_metrics_are_those_of_hotcoco(name, seed):
    case = random_case(seed, **MORE_CASES[name])
    metrics = metrics_of(case)
    for iou_type in ("bbox", "segm"):
        got = [value for key, value in metrics.items() if key.startswith(iou_type)]
        assert got == pytest.approx(list(evaluation_of(case, iou_type).stats), abs=1e-12), iou_type


@pytest.mark.parametrize("seed", range(6))
def test_metrics_at_edges_are_those_of_hotcoco(seed, tmp_path):
    """Areas that are exactly a limit of COCO's sizes, one pixel, whole images, scores of 0 and 1, an id of 0, in the
    way of its own fuzz test."""
    rng = np.random.default_rng(seed)
    sides = [(32, 32), (96, 96), (1, 1), (200, 150), (16, 64), (128, 72), (31, 33)]
    truth = dict(
        images=[dict(id=i, file_name=f"{i}.jpg", width=200, height=150) for i in range(int(rng.integers(1, 6)))],
        categories=[dict(id=7 * k, name=f"class {k}") for k in range(int(rng.integers(1, 4)))],
        annotations=[],
    )

    def box():
        width, height = sides[rng.integers(len(sides))]
        corner = [int(rng.integers(0, 201 - width)) // 8 * 8, int(rng.integers(0, 151 - height)) // 8 * 8]
        return [float(v) for v in (*corner, width, height)]

    def entry():
        ids = [int(rng.choice([part["id"] for part in truth[key]])) for key in ("images", "categories")]
        return dict(zip(("image_id", "category_id"), ids), bbox=box())

    for number in range(1, int(rng.integers(0, 40)) + 1):
        annotation = entry()
        area = annotation["bbox"][2] * annotation["bbox"][3]
        truth["annotations"].append(annotation | dict(id=number, area=area, iscrowd=int(rng.random() < 0.2)))
    results = [entry() | dict(score=float(rng.choice([0.0, 1.0, rng.random()]))) for _ in range(60)]
    copies = [a for a in truth["annotations"] if rng.random() < 0.7]
    results += [{key: a[key] for key in ("image_id", "category_id", "bbox")} | dict(score=0.5) for a in copies]
    case = Case(truth, {})
    evaluator = CocoEvaluator(case.dataset)
    (tmp_path / "results.json").write_text(json.dumps(results))
    evaluator.load_results(tmp_path / "results.json")
    expected = list(evaluation_of(case, results=results).stats)
    assert list(evaluator.compute().values()) == pytest.approx(expected, abs=1e-12)


def test_limits_on_detections_are_those_of_hotcoco():
    case = random_case(5, **CASES["more than 100 boxes"])
    with pytest.warns(UserWarning, match="max_dets differ from expected"):
        expected = evaluation_of(case, max_dets=[1, 10, 300]).get_results()
    expected["AR300"] = expected.pop("AR100")  # by its place
    metrics = metrics_of(case, max_dets=300)
    assert {name: metrics[f"bbox/{name}"] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert metrics["bbox/AR300"] > metrics_of(case)["bbox/AR100"] == pytest.approx(evaluation_of(case).stats[8])


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lvis_metrics_are_those_of_hotcoco(seed, iou_type, tmp_path):
    truth = federated_truth(num_images=30, seed=seed)
    results = federated_results(truth, seed=seed)
    dataset = PlainDataset(
        annotations=["objects"],
        classes=[category["name"] for category in truth["categories"]],
        category_ids=[category["id"] for category in truth["categories"]],
        image_ids=[image["id"] for image in truth["images"]],
        ground_truth=lambda: {
            **copy.deepcopy(truth),
            "annotations": [{"iscrowd": 0, **a} for a in truth["annotations"]],
        },
    )
    evaluator = LvisEvaluator(dataset, iou_types=["bbox", "segm"])
    (tmp_path / "results.json").write_text(json.dumps(results))
    evaluator.load_results(tmp_path / "results.json")
    metrics = evaluator.compute()
    if iou_type == "segm":  # with a box, its area would be taken for that of the mask
        results = [{k: v for k, v in result.items() if k != "bbox"} for result in results]
    theirs = hotcoco.LVIS(truth)
    evaluation = hotcoco.LVISEval(theirs, hotcoco.LVISResults(theirs, results), iou_type)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.run()
    expected = {
        name.replace("@300", "300" if name == "AR@300" else ""): v for name, v in evaluation.get_results().items()
    }
    assert len(expected) == 13
    assert {name: metrics[f"{iou_type}/{name}"] for name in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("crowds", [0.0, 0.15])
def test_panoptic_qualities_are_those_of_hotcoco(crowds, tmp_path):
    rng = np.random.default_rng(3)
    truths = {image_id: random_truth(rng, crowds=crowds) for image_id in range(1, 61)}
    predictions = {image_id: perturbed(rng, truth) for image_id, truth in truths.items()}
    categories = [dict(id=i, name=f"class {i}", isthing=int(t)) for i, t in zip(CATEGORY_IDS, THINGS)]
    images = [dict(id=i, file_name=f"{i}.jpg", height=40, width=56) for i in truths]
    for name, maps in (("truth", truths.items()), ("predicted", predictions.items())):
        maps = {i: (m if isinstance(m, tuple) else (m.panoptic, m.segments_info)) for i, m in maps}
        content = dict(images=images, categories=categories, annotations=write_panoptic(tmp_path / name, maps))
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with contextlib.redirect_stdout(io.StringIO()):
        expected = hotcoco.panoptic.pq_compute(tmp_path / "truth.json", tmp_path / "predicted.json")
    metrics, by_class = panoptic_qualities(panoptic_dataset(truths), predictions)
    for suffix, group in (("", "All"), ("_things", "Things"), ("_stuff", "Stuff")):
        got = [metrics[name + suffix] for name in ("PQ", "SQ", "RQ")]
        assert got == pytest.approx([expected[group][name] for name in ("pq", "sq", "rq")], abs=1e-12)
    theirs = {f"class {i}": numbers["pq"] for i, numbers in expected["per_class"].items()}
    assert by_class == pytest.approx(theirs, abs=1e-12) and 0.1 < metrics["PQ"] < 0.9


@pytest.mark.parametrize("num_classes", [2, 19, 150])
def test_semantic_metrics_are_those_of_hotcoco(num_classes):
    rng = np.random.default_rng(num_classes)
    truths, evaluation = [], hotcoco.semantic.SemanticEval(num_classes)
    # Some classes occur in the truth only, some in predictions only, some in neither.
    in_truth, in_predictions = (rng.choice(num_classes, max(2, num_classes // 2), replace=False) for _ in range(2))
    predictions = []
    for _ in range(6):
        truth = rng.choice([*in_truth, 255], (30, 40)).astype(np.uint8)
        predicted = np.where(rng.random(truth.shape) < 0.7, truth, rng.choice(in_predictions, truth.shape))
        predicted[predicted == 255] = in_predictions[0]
        truths.append(truth)
        predictions.append(predicted)
        evaluation.update(truth.astype(np.int64), predicted.astype(np.int64))
    dataset = PlainDataset(
        annotations=["semantic"], classes=[f"class {k}" for k in range(num_classes)],
        category_ids=list(range(num_classes)), image_ids=list(range(6)), load_semantic=truths.__getitem__,
    )  # fmt: skip
    evaluator = SemanticEvaluator(dataset, boundary=False)
    for k, predicted in enumerate(predictions):
        evaluator.update([dict(semantic=torch.from_numpy(predicted).long())], [dict(image_id=k)])
    evaluator.gather()
    metrics, results = evaluator.compute(), evaluation.results()
    assert metrics["pixel_accuracy"] == pytest.approx(results["aAcc"], abs=1e-12)
    assert metrics["mean_accuracy"] == pytest.approx(results["mAcc"], abs=1e-12)
    in_any = [entry for entry in results["per_class"] if entry["gt_area"] or entry["pred_area"]]
    expected = {entry["name"].replace("_", " "): entry["IoU"] for entry in in_any if entry["gt_area"]}
    ious = {name: iou for name, iou in evaluator.per_class().items() if iou >= 0}
    assert ious == pytest.approx(expected, abs=1e-12) and metrics["mIoU"] == pytest.approx(np.mean([*ious.values()]))
    # As in mmsegmentation, a class that is only predicted has IoU 0 in hotcoco's mean. In vitkit's it has none, as in
    # detectron2's and Mask2Former's: one wrong pixel of a class that no image has would cost 1 / C.
    assert results["mIoU"] == pytest.approx(sum(ious.values()) / len(in_any), abs=1e-12)


def breakdown_of(case):
    evaluator = evaluator_of(case)
    statistics = evaluator.statistics()
    errors = ErrorBreakdown(statistics, evaluator.select_results(), case.truth, case.category_ids)
    fixed = {
        kind: 100 * values[0] for kind, values in errors.fixed_ap(np.ones((1, len(statistics.sample_ids)))).items()
    }
    return errors.counts(), fixed["none"], {kind: fixed[kind] - fixed["none"] for kind in KINDS}


@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("name", [name for name, case in MORE_CASES.items() if not case.get("crowds")])
def test_kinds_of_errors_and_what_they_cost_are_those_of_hotcoco(name, seed):
    case = random_case(seed, **MORE_CASES[name])
    counts, ap, gains = breakdown_of(case)
    theirs = evaluation_of(case).tide_errors()
    assert counts == {kind: theirs["counts"][NAMES[kind]] for kind in KINDS}
    if not case.truth["annotations"]:  # hotcoco has 0 where there is no object, vitkit nothing
        assert theirs["ap_base"] == 0 and np.isnan(ap)
        return
    assert ap == pytest.approx(100 * theirs["ap_base"], abs=1e-9)
    expected = {kind: 100 * theirs["delta_ap"][NAMES[kind]] for kind in KINDS}
    if MORE_CASES[name].get("ties"):  # where a prediction ranks among equal scores of its new class is not defined
        assert gains.pop("class") == pytest.approx(expected.pop("class"), abs=0.1)
    assert gains == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", [name for name, case in MORE_CASES.items() if case.get("crowds")])
def test_crowds_are_no_objects_that_an_error_refers_to(name):
    """hotcoco takes them for such, unlike TIDE's own code (see test_tide.py): a false alarm that touches a crowd region
    is not on background. The number of wrong predictions, and what duplicates cost, are the same."""
    case = random_case(10, **MORE_CASES[name])
    counts, ap, gains = breakdown_of(case)
    theirs = evaluation_of(case).tide_errors()
    assert ap == pytest.approx(100 * theirs["ap_base"], abs=1e-9)
    assert sum(counts.values()) - counts["missed"] == sum(theirs["counts"].values()) - theirs["counts"]["Miss"]
    assert counts["background"] > theirs["counts"]["Bkg"] and counts["duplicate"] == theirs["counts"]["Dupe"]
    assert gains["duplicate"] == pytest.approx(100 * theirs["delta_ap"]["Dupe"], abs=1e-9)


@pytest.mark.parametrize("name", MORE_CASES)
def test_calibration_error_is_that_of_hotcoco(name):
    case = random_case(10, **MORE_CASES[name])
    for prediction in case.predictions.values():  # vitkit's leaves out scores that are hardly meant as detections
        prediction["scores"] = prediction["scores"].clamp(min=CALIBRATED)
        if MORE_CASES[name].get("ties"):  # tenths are edges of the bins, on either side of which float32 may lie
            prediction["scores"] = (prediction["scores"] - 0.03).clamp(min=CALIBRATED)
    counts = counts_by_score(evaluator_of(case).statistics())
    error = expected_calibration_error(counts.sum(-1)[None])[0]
    theirs = evaluation_of(case).calibration(n_bins=10)
    assert counts[0].sum() == theirs["num_detections"]
    assert error == pytest.approx(theirs["ece"], abs=1e-9) if theirs["num_detections"] else np.isnan(error)


def test_intervals_of_a_difference_are_those_of_hotcoco_for_images_that_count_once(monkeypatch):
    """hotcoco draws images with replacement and counts each of them once, which leaves out a third of the images and
    makes intervals narrower by a quarter: the bootstrap counts an image as often as it is drawn, as vitkit does."""
    case = random_case(7, num_images=60, num_classes=2)
    worse = {}
    for image_id, prediction in case.predictions.items():
        keep = torch.arange(len(prediction["scores"])) % 3 > 0
        worse[image_id] = {key: value[keep] for key, value in prediction.items()}
    models = [Compared("first", evaluator_of(case)), Compared("second", evaluator_of(case, worse))]
    evaluations = [evaluation_of(case, results=model.evaluator.results()) for model in models]
    theirs = hotcoco.compare(*evaluations, n_bootstrap=2000)
    bootstrap = compare(models).differences[0]
    once = np.minimum(bootstrap_weights(60, 2000), 1)
    monkeypatch.setattr(comparison, "bootstrap_weights", lambda num_images: once)
    ours = compare(models).differences[0]
    for name in ("AP", "AP50", "AR100"):
        difference, interval = ours[f"bbox/{name}"].difference, theirs["ci"][name]
        assert difference.value == pytest.approx(theirs["deltas"][name], abs=1e-12)
        width = interval["upper"] - interval["lower"]
        assert difference.low == pytest.approx(interval["lower"], abs=0.1 * width)
        assert difference.high == pytest.approx(interval["upper"], abs=0.1 * width)
        *_, true = bootstrap[f"bbox/{name}"]
        assert true.high - true.low == pytest.approx(width / 0.76, rel=0.15)


def test_labels_that_are_missing_or_of_another_class_are_those_that_hotcoco_finds():
    """Of predictions that are almost right, with one label in ten removed or given another class."""
    rng = np.random.default_rng(0)
    case = random_case(3, num_images=80, false_alarms=0)
    sizes = {image["id"]: [] for image in case.truth["images"]}
    annotations, results, planted = [], [], {}
    for annotation in case.truth["annotations"]:
        box = annotation["bbox"]
        others = sizes[annotation["image_id"]]
        if any(_touch(box, other) for other in others) or min(box[2:]) < 12:
            continue
        others.append(box)
        moved = [value + float(rng.normal(0, 0.5)) for value in box]
        category_id = annotation["category_id"]
        result = dict(image_id=annotation["image_id"], bbox=moved, category_id=category_id)
        results.append(result | dict(score=float(rng.uniform(0.7, 0.95))))
        change = rng.random()
        if change < 0.05:
            planted[len(results) - 1] = "missing"
            continue
        if change < 0.1:
            planted[len(results) - 1] = "class"
            category_id = case.category_ids[(case.category_ids.index(category_id) + 1) % 3]
        annotations.append({**annotation, "category_id": category_id})
    truth = {**case.truth, "annotations": annotations}
    theirs = evaluation_of(case._replace(truth=truth), results=results).image_diagnostics(score_thr=0.5)["label_errors"]
    kinds = {"missing_annotation": "missing", "wrong_label": "class"}
    assert {error["dt_id"] - 1: kinds[error["type"]] for error in theirs} == planted
    ours = [e for e in find_label_errors(truth, results, case.category_ids) if e.kind in kinds.values()]
    assert {error.prediction: error.kind for error in ours[: len(planted)]} == planted
    assert {"missing", "class"} <= {*planted.values()} and len(planted) > 8


def _touch(a, b):
    return all(a[k] < b[k] + b[k + 2] and b[k] < a[k] + a[k + 2] for k in (0, 1))
