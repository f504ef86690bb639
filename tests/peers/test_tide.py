"""Kinds of errors and what they cost beside TIDE's own code, `tidecv` (MIT), with boxes and masks."""

import math
from collections import Counter

import numpy as np
import pytest
from peers.coco_cases import CASES, random_case

from vitkit.apps.report.error_breakdown import KINDS, ErrorBreakdown
from vitkit.evaluation.coco import CocoEvaluator

tidecv = pytest.importorskip("tidecv")

pytestmark = pytest.mark.peers

NAMES = dict(zip(KINDS, ("Cls", "Loc", "Both", "Dupe", "Bkg", "Miss"), strict=True))
WITH_CROWDS = [name for name, case in CASES.items() if case.get("crowds")]
WITHOUT = [name for name in CASES if name not in (*WITH_CROWDS, "no objects", "no predictions")]


def tide_case(seed, **settings):
    """Return a random case without two things that TIDE's code does otherwise than COCO's.

    Its recalls are k / 100 and not numpy's 0.01 * k, so that a recall which is exactly one of them may lie on its other
    side: numbers of objects of a class that share no divisor with 100 have no such recall but 1. And a class that has
    only predictions counts with AP 0.
    """
    case = random_case(seed, **settings)
    counts = Counter(a["category_id"] for a in case.truth["annotations"] if not a["iscrowd"])
    kept = []
    for annotation in case.truth["annotations"]:
        category_id = annotation["category_id"]
        if not annotation["iscrowd"] and math.gcd(counts[category_id], 10) > 1:
            counts[category_id] -= 1
        else:
            kept.append(annotation)
    for prediction in case.predictions.values():
        known = np.array([counts[case.category_ids[label]] > 0 for label in prediction["labels"].tolist()], bool)
        prediction |= {key: value[known] for key, value in prediction.items()}
    return case._replace(truth={**case.truth, "annotations": kept})


def ours(case, iou_type):
    evaluator = CocoEvaluator(case.dataset, iou_types=[iou_type])
    for image_id, prediction in case.predictions.items():
        evaluator.update([prediction], [dict(image_id=image_id)])
    evaluator.gather()
    evaluator.compute()
    statistics = evaluator.statistics()
    errors = ErrorBreakdown(statistics, evaluator.select_results(), case.truth, case.category_ids)
    fixed = {
        kind: 100 * values[0] for kind, values in errors.fixed_ap(np.ones((1, len(statistics.sample_ids)))).items()
    }
    return errors.counts(), fixed["none"], {kind: fixed[kind] - fixed["none"] for kind in KINDS}


def theirs(case, iou_type):
    """Return the AP, what each kind costs, and the errors."""
    truth, predictions = tidecv.Data("truth"), tidecv.Data("predictions")
    for category in case.truth["categories"]:
        truth.add_class(category["id"], category["name"])
    for image_id in sorted(image["id"] for image in case.truth["images"]):  # of equal scores, the first image's first
        truth.add_image(image_id, str(image_id))
    for a in case.truth["annotations"]:
        add = truth.add_ignore_region if a["iscrowd"] else truth.add_ground_truth
        add(a["image_id"], a["category_id"], a["bbox"], a["segmentation"])
    for r in case.results(iou_type):
        predictions.add_detection(r["image_id"], r["category_id"], r["score"], r.get("bbox"), r.get("segmentation"))
    tide = tidecv.TIDE()
    run = tide.evaluate(
        truth, predictions, mode=tidecv.TIDE.BOX if iou_type == "bbox" else tidecv.TIDE.MASK, name="run"
    )
    return run.ap, tide.get_main_errors()["run"], run.errors


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", WITHOUT)
def test_kinds_of_errors_and_what_they_cost_are_tides(name, seed, iou_type):
    case = tide_case(seed, **CASES[name])
    counts, ap, gains = ours(case, iou_type)
    expected_ap, expected, errors = theirs(case, iou_type)
    of_kind = Counter(error.short_name for error in errors)
    assert counts == {kind: of_kind[NAMES[kind]] for kind in KINDS}
    assert ap == pytest.approx(expected_ap, abs=1e-9)
    if CASES[name].get("ties"):
        return  # what is left of equal scores is listed with errors first, so that gains, even of nothing, are lower
    # Without the missed objects, numbers may share a divisor with 100.
    assert gains.pop("missed") == pytest.approx(expected["Miss"], abs=0.1)
    assert gains == pytest.approx({kind: expected[NAMES[kind]] for kind in gains}, abs=1e-9)


@pytest.mark.parametrize("name", WITH_CROWDS)
def test_predictions_on_crowds_are_no_errors(name):
    """They count neither way in AP. TIDE's code lists them as errors all the same, and corrects some of them, which
    then do count; without them, its numbers of wrong predictions are vitkit's."""
    case = tide_case(3, **CASES[name])
    counts, ap, _ = ours(case, "bbox")
    expected_ap, _, errors = theirs(case, "bbox")
    assert ap == pytest.approx(expected_ap, abs=1e-9)
    of_kind = Counter(
        error.short_name for error in errors if hasattr(error, "pred") and error.pred["info"]["used"] is not None
    )
    assert {kind: counts[kind] for kind in KINDS[:-1]} == {kind: of_kind[NAMES[kind]] for kind in KINDS[:-1]}
    assert len(errors) > sum(counts.values())


def test_a_class_that_is_only_predicted_is_no_part_of_the_mean():
    case = random_case(0, num_classes=30, objects=3, num_images=10)
    with_objects = {a["category_id"] for a in case.truth["annotations"]}
    predicted = {case.category_ids[label] for p in case.predictions.values() for label in p["labels"].tolist()}
    ap, (expected, *_) = ours(case, "bbox")[1], theirs(case, "bbox")
    assert predicted > with_objects
    assert ap * len(with_objects) == pytest.approx(expected * len(predicted | with_objects), rel=0.03)  # its recalls
