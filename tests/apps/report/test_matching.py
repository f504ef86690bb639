"""Detections are matched with objects exactly as pycocotools does it, also for crowds, ignored objects and ties."""

import contextlib
import io

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit.apps.report.matching import compute_overlaps, list_confused_classes, match_detections
from vitkit.evaluation.matching import IOUS


def random_image(seed, *, num_objects, num_predictions, kinds=3):
    """Return objects and predictions on a coarse grid, with few scores, so that IoUs and scores tie often."""
    rng = np.random.default_rng(seed)

    def entry(**more):
        box = [*(10.0 * rng.integers(0, 4, 2)), *(10.0 * rng.integers(1, 4, 2))]
        return dict(image_id=1, category_id=int(rng.integers(kinds)), bbox=box, area=box[2] * box[3], **more)

    objects = [entry(iscrowd=int(rng.random() < 0.25)) for _ in range(num_objects)]
    predictions = [entry(score=float(rng.integers(1, 5)) / 5) for _ in range(num_predictions)]
    return objects, predictions


def official(objects, predictions, *, by_class):
    """Return the matches of COCOeval at each area range and IoU, and which predictions it ignores."""

    def indexed(entries):
        coco = COCO()
        numbered = [{"iscrowd": 0, **entry, "id": k} for k, entry in enumerate(entries, start=1)]
        # COCOeval's own useCats=False would order tied predictions by their classes.
        numbered = numbered if by_class else [{**entry, "category_id": 0} for entry in numbered]
        categories = [{"id": k} for k in range(3)]
        coco.dataset = {"images": [{"id": 1}], "categories": categories, "annotations": numbered}
        coco.createIndex()
        return coco

    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(indexed(objects), indexed(predictions), "bbox")
        evaluation.params.maxDets = [1000]
        # Also small ranges, beyond which objects are ignored.
        evaluation.params.areaRng = [[0, 1e10], [0, 350], [350, 1e10]]
        evaluation.params.areaRngLbl = ["all", "small", "large"]
        evaluation.evaluate()
    matched = np.full((3, len(IOUS), len(predictions)), -1)
    for entry in filter(None, evaluation.evalImgs):
        area = evaluation.params.areaRng.index(entry["aRng"])
        columns = np.array(entry["dtIds"], int) - 1
        matched[area][:, columns] = np.asarray(entry["dtMatches"], int) - 1
    return matched, evaluation.params.areaRng


CASES = [
    (0, 0, 0, 3),
    (1, 0, 5, 3),
    (2, 5, 0, 3),
    *((seed, 8, 20, 3) for seed in range(3, 40)),
    *((seed, 15, 60, 1) for seed in range(40, 50)),
]


@pytest.mark.parametrize("by_class", [True, False])
@pytest.mark.parametrize(("seed", "num_objects", "num_predictions", "kinds"), CASES)
def test_matches_equal_those_of_pycocotools(seed, num_objects, num_predictions, kinds, by_class):
    objects, predictions = random_image(seed, num_objects=num_objects, num_predictions=num_predictions, kinds=kinds)
    expected, ranges = official(objects, predictions, by_class=by_class)
    overlaps, crowd = compute_overlaps(predictions, objects, "bbox", (100, 100))
    if by_class:
        classes = [np.array([entry["category_id"] for entry in entries], int) for entries in (predictions, objects)]
        overlaps = np.where(classes[0][:, None] == classes[1], overlaps, -1.0)
    areas, scores = np.array([entry["area"] for entry in objects]), [entry["score"] for entry in predictions]
    for area, (low, high) in enumerate(ranges):
        ignored = (areas < low) | (areas > high)
        for k, iou in enumerate(IOUS):
            got = match_detections(overlaps, scores, crowd, iou=iou, ignored=ignored)
            assert got.tolist() == expected[area, k].tolist()


def test_predictions_above_a_threshold_keep_their_matches():
    objects, predictions = random_image(7, num_objects=12, num_predictions=60)
    overlaps, crowd = compute_overlaps(predictions, objects, "bbox", (100, 100))
    scores = np.array([entry["score"] for entry in predictions])
    matched = match_detections(overlaps, scores, crowd)
    for threshold in (0.3, 0.5, 0.7):
        kept = scores >= threshold
        assert match_detections(overlaps[kept], scores[kept], crowd).tolist() == matched[kept].tolist()


def test_classes_of_matches_by_hand():
    # Object 1 is a crowd, object 2 is missed; prediction 1 has no object, prediction 2 is on the crowd.
    true, crowd = np.array([0, 1, 1]), np.array([False, True, False])
    rows, columns = list_confused_classes(true, np.array([1, 0, 1]), crowd, np.array([0, -1, 1]), nothing=2)
    assert list(zip(rows.tolist(), columns.tolist())) == [(0, 1), (2, 0), (1, 2)]
    assert crowd.tolist() == [False, True, False]
