"""Calibration and matching beside uq-detr (MIT), by the authors of "Uncertainty Quantification in Detection
Transformers" (https://arxiv.org/abs/2412.01782)."""

import numpy as np
import pytest
import torch
from peers.coco_cases import CASES, random_case

from vitkit.apps.report.sections import NUM_BINS, calibration_counts, expected_calibration_error
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy, generalized_box_iou

uq_detr = pytest.importorskip("uq_detr")

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.get("crowds")])
def test_calibration_error_is_its_detection_ece(name, seed):
    """uq-detr's bins reach from the lowest score to the highest: here from 0 to 1, as vitkit's tenths."""
    case = random_case(seed, **CASES[name])
    rng = np.random.default_rng(seed)
    for prediction in case.predictions.values():  # no ties, as each side ranks those in its own way
        prediction["scores"] = torch.from_numpy(rng.random(len(prediction["scores"]))).float()
    nonempty = [prediction for prediction in case.predictions.values() if len(prediction["scores"]) > 1]
    if nonempty:
        nonempty[0]["scores"][0], nonempty[-1]["scores"][-1] = 0.0, 1.0
    evaluator = CocoEvaluator(case.dataset, max_dets=1000)  # uq-detr has no limit
    detections, truths = [], []
    for image_id, prediction in case.predictions.items():
        evaluator.update([prediction], [dict(image_id=image_id)])
        objects = [a for a in case.truth["annotations"] if a["image_id"] == image_id]
        boxes = np.array([a["bbox"] for a in objects], np.float64).reshape(-1, 4)
        truth = uq_detr.GroundTruth.from_xywh(
            boxes=boxes, labels=np.array([case.category_ids.index(a["category_id"]) for a in objects], np.int64)
        )
        truths.append(truth)
        detections.append(
            uq_detr.Detections(
                boxes=prediction["boxes_xyxy"].double().numpy(),
                scores=prediction["scores"].double().numpy(),
                labels=prediction["labels"].numpy(),
            )
        )
    evaluator.gather()
    evaluator.compute()
    statistics = evaluator.statistics()
    scores, image, correct = map(np.concatenate, [*zip(*statistics.rankings())][:3])
    counts = calibration_counts(scores, image, correct, len(statistics.sample_ids)).sum(-1)
    error = expected_calibration_error(counts[None])[0]
    expected = uq_detr.dece(detections, truths, tp_criterion="greedy", n_bins=NUM_BINS).score
    assert error == pytest.approx(expected, abs=1e-6) if nonempty else np.isnan(error)  # scores are float32 here


@pytest.mark.parametrize("seed", range(8))
def test_assignments_are_its_own(seed):
    rng = np.random.default_rng(seed)
    num_queries, num_objects, num_classes = 40, int(rng.integers(0, 30)), int(rng.choice([1, 5, 80]))
    logits = rng.normal(-2, 3, (num_queries, num_classes)).astype(np.float32)
    boxes, true_boxes = (
        np.concatenate([rng.uniform(0.1, 0.9, (n, 2)), rng.uniform(0.01, 0.5, (n, 2))], 1).astype(np.float32)
        for n in (num_queries, num_objects)
    )
    labels = rng.integers(num_classes, size=num_objects)
    expected = uq_detr.hungarian_match(logits, boxes, labels, true_boxes)
    layer = dict(pred_logits=torch.from_numpy(logits)[None], pred_boxes=torch.from_numpy(boxes)[None])
    target = dict(labels=torch.from_numpy(labels), boxes_cxcywh=torch.from_numpy(true_boxes))
    matcher = HungarianMatcher(2.0, 5.0, 2.0, activation="sigmoid")
    ((((queries, targets),),),) = matcher([([layer], [target])])
    assert dict(zip(targets.tolist(), queries.tolist())) == dict(zip(expected[1].tolist(), expected[0].tolist()))


@pytest.mark.parametrize("seed", range(4))
def test_overlaps_are_its_own(seed):
    rng = np.random.default_rng(seed)
    a, b = (np.concatenate([rng.uniform(0, 1, (n, 2)), rng.uniform(0, 0.6, (n, 2))], 1) for n in (20, 30))
    a[:5, 2] = 0  # without area
    a, b = (cxcywh_to_xyxy(torch.from_numpy(boxes)) for boxes in (a, b))
    pair = a[:, None], b[None]
    np.testing.assert_allclose(box_iou(*pair), uq_detr.compute_iou_matrix(a.numpy(), b.numpy()), atol=1e-9)
    np.testing.assert_allclose(generalized_box_iou(*pair), uq_detr.compute_giou_matrix(a.numpy(), b.numpy()), atol=1e-6)
