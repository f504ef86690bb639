"""The kinds of errors, and the AP after correcting each kind, by hand."""

import json

import numpy as np
import pytest
from helpers.plain_dataset import PlainDataset

from vitkit.apps.report.error_breakdown import KINDS, ErrorBreakdown, error_kind
from vitkit.apps.report.intervals import bootstrap_weights
from vitkit.evaluation.coco import CocoEvaluator


class Truth(PlainDataset):
    annotations = ("objects",)
    category_ids, classes, image_ids = [3, 7], ["cat", "dog"], [1]

    def __init__(self, annotations):
        images = [{"id": 1, "width": 300, "height": 300}]
        categories = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
        self._content = dict(images=images, annotations=annotations, categories=categories)

    def ground_truth(self):
        return self._content


def breakdown(objects, predictions, tmp_path):
    annotations = [
        dict(id=k, image_id=1, category_id=c, bbox=box, area=box[2] * box[3], iscrowd=int(bool(crowd)))
        for k, (c, box, *crowd) in enumerate(objects, start=1)
    ]
    results = [dict(image_id=1, category_id=c, bbox=box, score=score) for c, box, score in predictions]
    (tmp_path / "r.json").write_text(json.dumps(results))
    evaluator = CocoEvaluator(Truth(annotations))
    evaluator.load_results(tmp_path / "r.json")
    metrics = evaluator.compute()
    truth = evaluator.dataset.ground_truth()
    return ErrorBreakdown(evaluator.statistics(), evaluator.results(), truth, [3, 7]), metrics


OBJECTS = [
    (3, [0, 0, 20, 20]),  # detected, and once more
    (3, [100, 0, 20, 20]),  # taken for a dog
    (7, [0, 100, 20, 20]),  # badly localized
    (7, [200, 200, 20, 20]),  # missed
    (3, [200, 0, 40, 40], True),  # a crowd
]
PREDICTIONS = [
    (3, [0, 0, 20, 20], 0.9),  # right
    (3, [0, 0, 20, 18], 0.8),  # duplicate
    (7, [100, 0, 20, 20], 0.7),  # class
    (7, [10, 100, 20, 20], 0.6),  # localization: IoU 1/3
    (3, [0, 110, 20, 20], 0.5),  # both: IoU 1/3 with a dog
    (3, [150, 150, 20, 20], 0.95),  # background
    (3, [205, 5, 20, 20], 0.4),  # on the crowd: not counted
]


def test_each_error_kind_is_assigned_once(tmp_path):
    errors, _ = breakdown(OBJECTS, PREDICTIONS, tmp_path)
    assert errors.counts() == dict.fromkeys(KINDS, 1)
    assert len(errors.predictions.scores) == 6


def test_ap_without_each_error_kind_by_hand(tmp_path):
    errors, metrics = breakdown(OBJECTS, PREDICTIONS, tmp_path)
    fixed = {kind: values[0] for kind, values in errors.fixed_ap(bootstrap_weights(1, 0)).items()}
    assert fixed["none"] == pytest.approx(metrics["bbox/AP50"])
    # One of two cats is right, ranked after the background box: recalls up to 0.5 (51 of 101) have a precision of 1/2;
    # no dog is right.
    assert fixed["none"] == pytest.approx(51 / 101 * 0.5 / 2)
    assert fixed["background"] == pytest.approx(51 / 101 / 2)
    # The cat taken for a dog, corrected, ranks among the cats' predictions: background, right, duplicate, right: 2/4.
    assert fixed["class"] == pytest.approx((51 * 0.5 + 50 * 0.5) / 101 / 2)
    # One dog is right, ranked after the cat taken for a dog: precision 1/2 up to a recall of 1/2.
    assert fixed["localization"] == pytest.approx((51 * 0.5 + 51 * 0.5) / 101 / 2)
    assert fixed["duplicate"] == fixed["both"] == fixed["none"]
    # The missed dog is no longer counted; the remaining dog predictions are wrong.
    assert fixed["missed"] == pytest.approx(fixed["none"])


def test_only_one_of_two_predictions_fixed_to_the_same_object_remains(tmp_path):
    objects = [(3, [0, 0, 20, 20])]
    errors, _ = breakdown(objects, [(3, [10, 0, 20, 20], 0.9), (3, [11, 0, 20, 20], 0.8)], tmp_path)
    assert errors.counts()["localization"] == 2 and errors.counts()["missed"] == 0
    assert errors.fixed_ap(np.ones((1, 1)))["localization"][0] == pytest.approx(1.0)


def test_only_the_best_of_predictions_with_different_errors_is_fixed_to_an_object(tmp_path):
    objects = [(3, [0, 0, 20, 20]), (7, [100, 100, 20, 20])]
    errors, _ = breakdown(objects, [(3, [10, 0, 20, 20], 0.9), (7, [0, 0, 20, 20], 0.8)], tmp_path)
    assert errors.counts() == dict.fromkeys(KINDS, 0) | {"localization": 1, "class": 1, "missed": 1}
    fixed = {kind: values[0] for kind, values in errors.fixed_ap(np.ones((1, 1))).items()}
    assert fixed["localization"] == pytest.approx(0.5)
    assert fixed["class"] == 0  # the better one, badly localized, would detect the cat


def test_equal_scores_rank_by_image_as_in_the_metrics(tmp_path):
    """The first class has a prediction in the second image only, the other class in both."""
    results = [
        dict(image_id=image_id, category_id=category_id, bbox=[0, 0, size, size], score=0.5)
        for image_id, category_id, size in ((2, 3, 20), (2, 7, 20), (1, 7, 5))
    ]
    truth = Truth([
        dict(id=k, image_id=2, category_id=c, bbox=[0, 0, 20, 20], area=400, iscrowd=0) for k, c in ((1, 3), (2, 7))
    ])  # fmt: skip
    truth.image_ids = [1, 2]
    truth.ground_truth()["images"].append({"id": 2, "width": 300, "height": 300})
    (tmp_path / "r.json").write_text(json.dumps(results))
    evaluator = CocoEvaluator(truth)
    evaluator.load_results(tmp_path / "r.json")
    ap = evaluator.compute()["bbox/AP50"]
    errors = ErrorBreakdown(evaluator.statistics(), evaluator.results(), truth.ground_truth(), [3, 7])
    assert errors.fixed_ap(np.ones((1, 2)))["none"][0] == pytest.approx(ap) == pytest.approx(0.75)


def test_all_objects_are_missed_without_predictions(tmp_path):
    errors, _ = breakdown(OBJECTS, [], tmp_path)
    assert errors.counts() == dict.fromkeys(KINDS, 0) | {"missed": 4}
    assert errors.fixed_ap(np.ones((1, 1)))["missed"][0] == 0  # no object is left of either class


def test_a_class_whose_objects_are_all_missed_stays_in_the_mean(tmp_path):
    objects = [(3, [0, 0, 20, 20]), (7, [100, 100, 20, 20])]
    errors, _ = breakdown(objects, [(3, [0, 0, 20, 20], 0.9)], tmp_path)
    fixed = {kind: values.tolist() for kind, values in errors.fixed_ap(np.array([[1.0], [0.0]])).items()}
    assert fixed["none"][0] == fixed["missed"][0] == pytest.approx(0.5)
    assert np.isnan(fixed["missed"][1])  # a resample without images has no class


@pytest.mark.parametrize(
    ("overlaps", "same", "kind"),
    [
        ([], [], "background"),
        ([0.05, 0.09], [True, False], "background"),
        ([0.3, 0.6], [True, False], "localization"),
        ([0.05, 0.6], [True, False], "class"),
        ([0.3, 0.4], [True, False], "localization"),
        ([0.05, 0.4], [True, False], "both"),
        ([0.7, 0.6], [True, False], "class"),
        ([0.7, 0.3], [True, False], "duplicate"),
    ],
)
def test_error_kind_follows_from_class_and_iou(overlaps, same, kind):
    assert KINDS[error_kind(np.array(overlaps), np.array(same, bool))[0]] == kind
