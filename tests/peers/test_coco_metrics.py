"""CocoEvaluator beside faster-coco-eval (C++) and torchmetrics, on random and degenerate detections."""

import contextlib
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from peers.coco_cases import CASES, Case, metrics_of, random_case

from vitkit.evaluation.coco import CocoEvaluator

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_twelve_metrics_are_those_of_faster_coco_eval(name, seed):
    faster_coco_eval = pytest.importorskip("faster_coco_eval")
    case = random_case(seed, **CASES[name])
    metrics = metrics_of(case)
    for iou_type in ("bbox", "segm"):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = faster_coco_eval.COCO(case.truth)
            evaluation = faster_coco_eval.COCOeval_faster(truth, truth.loadRes(case.results(iou_type)), iou_type)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        expected = [float(value) for value in evaluation.stats[:12]]
        got = [value for key, value in metrics.items() if key.startswith(iou_type)]
        assert got == pytest.approx(expected, abs=1e-9), iou_type


TORCHMETRICS = {
    **{"AP": "map", "AP50": "map_50", "AP75": "map_75", "APs": "map_small", "APm": "map_medium", "APl": "map_large"},
    **{"AR1": "mar_1", "AR10": "mar_10", "AR100": "mar_100"},
    **{"ARs": "mar_small", "ARm": "mar_medium", "ARl": "mar_large"},
}
"""vitkit's names of the metrics -> those of torchmetrics."""


@pytest.mark.parametrize("seed", [2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
def test_twelve_metrics_are_those_of_torchmetrics(name, iou_type, seed):
    pytest.importorskip("faster_coco_eval")
    detection = pytest.importorskip("torchmetrics.detection")
    case = random_case(seed, **CASES[name])
    if iou_type == "segm":
        # torchmetrics drops images without an annotated mask, so false alarms there cost nothing; in COCO they do.
        case = case.of_images({a["image_id"] for a in case.truth["annotations"]})
    # torchmetrics' default thresholds are rounded to float32 (0.30000001 for 0.3), which moves recalls and IoUs that
    # are exactly a threshold to its other side and its AP by up to 0.001; COCO's are float64.
    thresholds = dict(
        iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(), rec_thresholds=np.linspace(0, 1, 101).tolist()
    )
    metric = detection.MeanAveragePrecision(iou_type=iou_type, backend="faster_coco_eval", **thresholds)
    metric.warn_on_many_detections = False
    label_of = {category_id: label for label, category_id in enumerate(case.category_ids)}
    for image_id, prediction in sorted(case.predictions.items()):  # of equal scores, the lower image id comes first
        objects = [a for a in case.truth["annotations"] if a["image_id"] == image_id]
        target = {
            "labels": torch.tensor([label_of[a["category_id"]] for a in objects], dtype=torch.int64),
            "iscrowd": torch.tensor([a["iscrowd"] for a in objects], dtype=torch.int64),
            "area": torch.tensor([a["area"] for a in objects]),
        }
        if iou_type == "bbox":
            boxes = torch.tensor([a["bbox"] for a in objects]).reshape(-1, 4)
            target["boxes"] = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], dim=1)
            preds = dict(boxes=prediction["boxes_xyxy"])
        else:
            target["masks"] = decoded([a["segmentation"] for a in objects], prediction["masks"].shape[1:])
            preds = dict(masks=prediction["masks"])
        metric.update([preds | {k: prediction[k] for k in ("scores", "labels")}], [target])
    expected = metric.compute()
    metrics = metrics_of(case)
    got = [metrics[f"{iou_type}/{name}"] for name in TORCHMETRICS]
    # float32, and boxes that went from (x, y, width, height) to corners and back
    assert got == pytest.approx([float(expected[name]) for name in TORCHMETRICS.values()], abs=2e-6)


def decoded(rles, size):
    from pycocotools import mask as coco_mask

    if not rles:
        return torch.zeros(0, *size, dtype=torch.bool)
    return torch.from_numpy(coco_mask.decode(rles)).permute(2, 0, 1).bool()


@pytest.mark.parametrize("max_dets", [(1, 10, 300), (2, 5, 20)])
def test_other_limits_on_detections_are_those_of_faster_coco_eval(max_dets):
    faster_coco_eval = pytest.importorskip("faster_coco_eval")
    case = random_case(5, **CASES["more than 100 boxes"])
    metrics = metrics_of(case, max_dets=max_dets)
    for iou_type in ("bbox", "segm"):
        with contextlib.redirect_stdout(io.StringIO()):
            truth = faster_coco_eval.COCO(case.truth)
            evaluation = faster_coco_eval.COCOeval_faster(truth, truth.loadRes(case.results(iou_type)), iou_type)
            evaluation.params.maxDets = list(max_dets)
            evaluation.evaluate()
            evaluation.accumulate()
        precision, recall = evaluation.eval["precision"], evaluation.eval["recall"]
        for name, part in {"AP": precision[:, :, :, 0, 2], "APm": precision[:, :, :, 2, 2]}.items():
            assert metrics[f"{iou_type}/{name}"] == pytest.approx(part[part > -1].mean(), abs=1e-9)
        for k, limit in enumerate(max_dets):
            part = recall[:, :, 0, k]
            assert metrics[f"{iou_type}/AR{limit}"] == pytest.approx(part[part > -1].mean(), abs=1e-9)


FAKE_RESULTS = {  # tests/test_cocoapi_fake_data.py of faster_coco_eval 1.8.0 (Apache-2.0)
    "bbox": [
        *(0.5045806987249628, 0.6969727247299577, 0.5729816669904824),
        *(0.5856257209410443, 0.5193996948036719, 0.5013978986347466),
        *(0.38681277964578054, 0.5936795762842003, 0.595352982877607),
        *(0.6398109626113442, 0.5664205978994309, 0.5642905982905982),
    ],
    "segm": [
        *(0.3195452758576433, 0.5622883972521636, 0.29892653412086784),
        *(0.3873740315997838, 0.31018272403369485, 0.3269339071005138),
        *(0.2682297225711534, 0.41544868114906375, 0.4168394992198818),
        *(0.4694498622754236, 0.37675922666197265, 0.3814715099715099),
    ],
}


@pytest.mark.parametrize("iou_type", FAKE_RESULTS)
def test_metrics_of_cocos_fake_results_are_the_published_ones(iou_type):
    """COCO's own example of 100 photos, from `tests/dataset/cocoapi` in a checkout of faster_coco_eval."""
    folder = Path(os.environ.get("VITKIT_COCO_FAKE_RESULTS", ""))
    if not (folder / "instances_val2014_100.json").is_file():
        pytest.skip("set VITKIT_COCO_FAKE_RESULTS to tests/dataset/cocoapi of github.com/MiXaiLL76/faster_coco_eval")
    truth = json.loads((folder / "instances_val2014_100.json").read_text())
    evaluator = CocoEvaluator(Case(truth, {}).dataset, iou_types=[iou_type])
    evaluator.load_results(folder / f"instances_val2014_fake{iou_type}100_results.json")
    evaluator.gather()
    assert list(evaluator.compute().values()) == pytest.approx(FAKE_RESULTS[iou_type], abs=1e-10)
