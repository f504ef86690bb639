"""Precision, recall, F1 and confusions at a score threshold, by hand."""

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from pycocotools import mask as coco_mask

from vitkit.apps.report.matching import confusion_matrix
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.detection_matches import Predictions
from vitkit.evaluation.score_thresholds import compute_threshold_rows, find_best_row

IMAGES = [{"id": 1, "height": 100, "width": 100}, {"id": 2, "height": 100, "width": 100}]


def truth(*objects):
    """Return ground truth from tuples (image, category, box[, crowd])."""
    annotations = [
        {"id": k, "image_id": i, "category_id": c, "bbox": box, "area": box[2] * box[3], "iscrowd": int(bool(crowd))}
        for k, (i, c, box, *crowd) in enumerate(objects, start=1)
    ]
    return {"images": IMAGES, "annotations": annotations, "categories": [{"id": 3}, {"id": 7}]}


def found(*predictions):
    """Return results from tuples (image, category, box, score)."""
    return [dict(image_id=i, category_id=c, bbox=box, score=score) for i, c, box, score in predictions]


TRUTH = truth((1, 3, [0, 0, 10, 10]), (1, 7, [50, 50, 20, 20]), (2, 3, [0, 0, 10, 10]))
RESULTS = found(
    (1, 3, [0, 0, 10, 9], 0.9),  # right
    (1, 3, [0, 0, 10, 10], 0.8),  # duplicate of a detected object
    (1, 3, [50, 50, 20, 20], 0.7),  # of the other class
    (2, 3, [0, 0, 10, 6], 0.6),  # right, IoU 0.6
    (2, 7, [80, 80, 5, 5], 0.2),  # no object there
)


class Detected(PlainDataset):
    annotations = ("objects",)
    classes, category_ids, image_ids = ["cat", "dog"], [3, 7], [1, 2]

    def __init__(self, content):
        self.content = content

    def ground_truth(self):
        return self.content


def rankings(content, results, *, iou_type="bbox", iou=0.5):
    """Return the rankings of both classes after the results were matched."""
    evaluator = CocoEvaluator(Detected(content), iou_types=[iou_type], iou=iou)
    for image_id in {result["image_id"] for result in results}:
        rows = [result for result in results if result["image_id"] == image_id]
        ids, boxes, scores = (np.array([row[key] for row in rows]) for key in ("category_id", "bbox", "score"))
        masks = [row["segmentation"] for row in rows] if iou_type == "segm" else None
        evaluator.stored_predictions[image_id] = Predictions(ids, boxes, scores, masks)
    evaluator.compute()
    return evaluator.statistics().rankings()


def test_precision_recall_and_f1_by_hand():
    rows = compute_threshold_rows(rankings(TRUTH, RESULTS), [0.0, 0.5, 0.85, 0.95])
    assert [(row.true_positives, row.false_positives, row.false_negatives) for row in rows] == [
        (2, 3, 1),
        (2, 2, 1),
        (1, 0, 2),
        (0, 0, 3),
    ]
    assert rows[0].precision == pytest.approx(2 / 5) and rows[0].recall == pytest.approx(2 / 3)
    assert rows[0].f1 == pytest.approx(2 * (2 / 5) * (2 / 3) / (2 / 5 + 2 / 3))
    assert (rows[3].precision, rows[3].recall, rows[3].f1) == (1.0, 0.0, 0.0)


def test_a_higher_iou_matches_less():
    (row,) = compute_threshold_rows(rankings(TRUTH, RESULTS, iou=0.75), [0.0])
    assert (row.true_positives, row.false_positives) == (1, 4)


def test_best_threshold_has_the_highest_f1():
    best = find_best_row(rankings(TRUTH, RESULTS))
    every = compute_threshold_rows(rankings(TRUTH, RESULTS), [r["score"] for r in RESULTS])
    assert best == pytest.approx(max(every, key=lambda row: row.f1))
    assert find_best_row(rankings(TRUTH, []))[:4] == (1.0, 1.0, 0.0, 0.0)


def test_equal_scores_share_a_threshold():
    results = found((1, 3, [0, 0, 10, 10], 0.5), *[(1, 3, [80, 80, 5, 5], 0.5)] * 3)
    best = find_best_row(rankings(truth((1, 3, [0, 0, 10, 10])), results))
    assert (best.true_positives, best.false_positives) == (1, 3)


def test_predictions_on_a_crowd_are_neither_right_nor_wrong():
    crowd = truth((1, 3, [0, 0, 50, 50], True), (1, 3, [60, 60, 10, 10]))
    results = found((1, 3, [10, 10, 10, 10], 0.9), (1, 3, [60, 60, 10, 10], 0.8))
    scores, _, right, _ = rankings(crowd, results)[0]
    assert (scores.tolist(), right.tolist()) == ([0.8], [True])
    assert confusion_matrix(crowd, results, [3, 7]).tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_confusions_by_hand():
    matrix = confusion_matrix(TRUTH, RESULTS, [3, 7], threshold=0.5)
    # Rows: 3, 7, no object. The box with the higher score is matched to the object, the other one to no object.
    assert matrix.tolist() == [[2, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert confusion_matrix(TRUTH, RESULTS, [3, 7], threshold=0.85).tolist() == [[1, 0, 1], [0, 0, 1], [0, 0, 0]]
    assert confusion_matrix(TRUTH, [], [3, 7]).tolist() == [[0, 0, 2], [0, 0, 1], [0, 0, 0]]


def test_segmentation_is_matched_by_masks():
    def rle(rows):
        mask = np.zeros((100, 100), np.uint8, order="F")
        mask[rows] = 1
        return coco_mask.encode(mask)

    content = truth((1, 3, [0, 0, 100, 10]))
    content["annotations"][0]["segmentation"] = [[0, 0, 100, 0, 100, 10, 0, 10]]
    results = [dict(image_id=1, category_id=3, score=0.5, bbox=[0, 0, 100, 10], segmentation=rle(slice(0, 4)))]
    assert compute_threshold_rows(rankings(content, results, iou_type="segm"), [0.0])[0].true_positives == 0
    assert compute_threshold_rows(rankings(content, results, iou_type="bbox"), [0.0])[0].true_positives == 1
    results[0]["segmentation"] = rle(slice(0, 9))
    assert compute_threshold_rows(rankings(content, results, iou_type="segm"), [0.0])[0].true_positives == 1


def test_details_are_the_coco_metrics_by_class_and_size():
    evaluator = CocoEvaluator(Detected(truth((1, 3, [0, 0, 10, 10]), (1, 7, [50, 50, 40, 40]), (2, 3, [0, 0, 96, 97]))))
    assert evaluator.details() == ({}, {})
    evaluator.update(
        [dict(boxes_xyxy=torch.tensor([[0.0, 0, 10, 10]]), labels=torch.tensor([0]), scores=torch.tensor([0.9]))],
        [{"image_id": 1}],
    )
    metrics = evaluator.compute()
    by_class, by_size = evaluator.details()
    assert by_class["cat"]["objects"] == 2 and by_class["dog"] == {
        "AP": 0.0,
        "AP50": 0.0,
        "AP75": 0.0,
        "AR": 0.0,
        "APs": -1.0,
        "APm": 0.0,
        "APl": -1.0,
        "objects": 1,
    }
    assert by_class["cat"]["AP"] == pytest.approx(evaluator.per_class()["cat"])
    assert [by_size[size]["objects"] for size in ("small", "medium", "large")] == [1, 1, 1]
    assert by_size["small"]["AP"] == pytest.approx(metrics["bbox/APs"]) == 1.0
    assert by_size["large"]["AR"] == pytest.approx(metrics["bbox/ARl"]) == 0.0
