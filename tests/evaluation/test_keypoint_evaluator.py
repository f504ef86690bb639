"""COCO's metrics of keypoints are those of pycocotools; PCK counts points within a part of the box."""

import contextlib
import io
import json
import re

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit.apps.report import write_report
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import coco as coco_module
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.evaluation.keypoints import METRICS
from vitkit.structures import KeypointInfo


def dataset_of(annotations, num_keypoints, sigmas, num_images, num_classes=2):
    names = tuple(f"point {k}" for k in range(num_keypoints))
    images = [dict(id=i, file_name=f"{i}.jpg", width=400, height=300) for i in range(1, num_images + 1)]
    categories = [dict(id=3 * k + 2, name=f"class {k}", keypoints=list(names)) for k in range(num_classes)]
    return PlainDataset(
        annotations=["objects"],
        classes=[category["name"] for category in categories],
        category_ids=[category["id"] for category in categories],
        image_ids=[image["id"] for image in images],
        keypoints=KeypointInfo(names, sigmas=tuple(sigmas)),
        ground_truth=lambda: dict(images=images, annotations=annotations, categories=categories),
    )


def random_case(seed, num_keypoints, num_images=12):
    """Return a dataset with crowds, unlabeled objects and hidden points, and predictions of varied quality."""
    rng = np.random.default_rng(seed)
    annotations, predictions = [], []
    for image_id in range(1, num_images + 1):
        rows = []
        for _ in range(rng.integers(0, 6)):
            size = rng.uniform(15, 160, 2)
            corner = rng.uniform(0, [400, 300] - size)
            points = corner + rng.uniform(0, 1, (num_keypoints, 2)) * size
            seen = rng.integers(0, 3, num_keypoints) * (rng.random() > 0.2)
            label = int(rng.integers(2))
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=image_id,
                    category_id=3 * label + 2,
                    bbox=[*corner.tolist(), *size.tolist()],
                    area=float(size.prod() * 0.6),
                    iscrowd=int(rng.random() < 0.15),
                    keypoints=np.column_stack([points * (seen > 0)[:, None], seen]).ravel().tolist(),
                    num_keypoints=int((seen > 0).sum()),
                )
            )
            for _ in range(rng.integers(0, 9)):
                moved = points + rng.normal(0, 1, points.shape) * size * rng.choice([0.02, 0.06, 0.2])
                rows.append((moved, label if rng.random() < 0.9 else 1 - label, rng.integers(1, 20) / 20))
        for _ in range(rng.integers(0, 30)):
            points = rng.uniform(0, 300, (num_keypoints, 2))
            rows.append((points, int(rng.integers(2)), rng.random()))
        points = torch.tensor(np.array([row[0] for row in rows]).reshape(-1, num_keypoints, 2), dtype=torch.float32)
        predictions.append(
            dict(
                keypoints=torch.cat([points, torch.ones(len(rows), num_keypoints, 1)], 2),
                labels=torch.tensor([row[1] for row in rows], dtype=torch.int64),
                scores=torch.tensor([row[2] for row in rows], dtype=torch.float32),
                boxes_xyxy=torch.cat([points.min(1)[0], points.max(1)[0]], 1) if rows else torch.zeros(0, 4),
            )
        )
    return dataset_of(annotations, num_keypoints, rng.uniform(0.02, 0.12, num_keypoints), num_images), predictions


def by_pycocotools(dataset, results):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = dataset.ground_truth()
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), iouType="keypoints")
        evaluation.params.kpt_oks_sigmas = np.array(dataset.keypoints.sigmas)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats


@pytest.mark.parametrize(("seed", "num_keypoints"), [(0, 17), (1, 17), (2, 5), (3, 1), (4, 31), (5, 17)])
def test_equals_pycocotools(seed, num_keypoints):
    dataset, predictions = random_case(seed, num_keypoints)
    evaluator = CocoEvaluator(dataset, iou_types=["bbox", "keypoints"])
    evaluator.update(predictions, [dict(image_id=i) for i in dataset.image_ids])
    metrics = evaluator.compute()
    # loadRes looks for a box first: without one, it takes the one around the points.
    results = [{k: v for k, v in result.items() if k != "bbox"} for result in evaluator.results()]
    expected = dict(zip(METRICS, by_pycocotools(dataset, results), strict=True))
    for name, value in expected.items():
        assert abs(metrics[f"keypoints/{name}"] - value) <= 1e-12, name
    assert 0 < metrics["keypoints/AP"] < 0.9
    table = evaluator.table()
    assert "PCK" in table and f"{metrics['keypoints/AP']:.3f}" in table and "keypoints" in table
    once = np.ones((1, len(dataset.image_ids)))
    scores = evaluator.statistics("keypoints").scores(once).overall
    for name, value in expected.items():
        assert value == -1 or abs(scores[f"keypoints/{name}"][0] - value) <= 1e-9, name


def test_written_results_are_read_back(tmp_path):
    dataset, predictions = random_case(7, 5)
    evaluator = CocoEvaluator(dataset, iou_types=["keypoints"])
    evaluator.update(predictions, [dict(image_id=i) for i in dataset.image_ids])
    metrics = evaluator.compute()
    evaluator.write_results(tmp_path / "results.json")
    again = CocoEvaluator(dataset, iou_types=["keypoints"])
    again.load_results(tmp_path / "results.json")
    assert again.compute() == pytest.approx(metrics, abs=1e-12)
    (tmp_path / "wrong.json").write_text(
        '[{"image_id": 1, "category_id": 2, "score": 1, "keypoints": [1, 2, 1]}]'
    )  # of one point
    with pytest.raises(DataError, match="expected 3 x 5 finite numbers"):
        again.load_results(tmp_path / "wrong.json")


def test_ranks_match_their_own_images(monkeypatch):
    dataset, predictions = random_case(8, 17)
    targets = [dict(image_id=i) for i in dataset.image_ids]
    alone = CocoEvaluator(dataset, iou_types=["keypoints"])
    alone.update(predictions, targets)
    expected = alone.compute()
    shared = CocoEvaluator(dataset, iou_types=["keypoints"])
    shared.update(predictions, targets)
    gathered = []
    monkeypatch.setattr(coco_module, "world_size", lambda: 2)
    monkeypatch.setattr(coco_module, "gather_dicts", lambda own: gathered.append(own) or own)
    shared.gather()
    assert len(gathered[0]) == len(dataset.image_ids)
    monkeypatch.setattr(shared, "_match", lambda *arguments, known, **others: known)  # what ranks sent is used
    assert shared.compute() == expected


def test_pck_counts_points_within_a_fifth_of_the_longer_side():
    points = [10, 10, 2, 110, 10, 1, 60, 60, 0]
    annotation = dict(
        id=1, image_id=1, category_id=2, bbox=[10, 10, 100, 50], area=90000, iscrowd=0, keypoints=points,
        num_keypoints=2,
    )  # fmt: skip
    missed = {**annotation, "id": 2, "image_id": 2}
    dataset = dataset_of([annotation, missed], 3, [0.5] * 3, 2)
    evaluator = CocoEvaluator(dataset, iou_types=["keypoints"])
    predicted = torch.tensor([[[10.0, 29.9, 1], [110.0, 30.1, 1], [0, 0, 1]]])  # 19.9 and 20.1 pixels away
    prediction = dict(
        keypoints=predicted, labels=torch.tensor([0]), scores=torch.tensor([0.9]), boxes_xyxy=torch.ones(1, 4)
    )
    evaluator.update([prediction], [dict(image_id=1)])
    assert evaluator.compute()["keypoints/PCK"] == 1 / 4
    assert evaluator.correct_points() == {"point 0": (1, 2), "point 1": (0, 2), "point 2": (0, 0)}


def test_drawn_shapes_are_their_own_best_prediction():
    dataset = ShapesDetection(20, keypoints=True)
    evaluator = CocoEvaluator(dataset, iou_types=["bbox", "keypoints"])
    evaluator.check_dataset()
    for index in range(20):
        target = dataset[index]["target"]
        scale = torch.tensor(target["image_size"][::-1]).repeat(2)
        boxes = target["boxes_cxcywh"] * scale
        boxes = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
        prediction = dict(
            boxes_xyxy=boxes, labels=target["labels"], scores=torch.ones(len(boxes)), keypoints=target["keypoints"]
        )
        evaluator.update([prediction], [target])
    metrics = evaluator.compute()
    assert metrics["keypoints/AP"] == metrics["keypoints/PCK"] == pytest.approx(1)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="does not load any. Set its keypoints=True"):
        CocoEvaluator(ShapesDetection(2), iou_types=["keypoints"])
    evaluator = CocoEvaluator(ShapesDetection(2, keypoints=True), iou_types=["keypoints"])
    boxes = dict(boxes_xyxy=torch.zeros(1, 4), labels=torch.tensor([0]), scores=torch.ones(1))
    with pytest.raises(ConfigError, match="the model predicts no keypoints"):
        evaluator.update([boxes], [dict(image_id=1)])
    with pytest.raises(DataError, match=r"have the shape \(1, 17, 3\); expected \(objects, 4, 3\)"):
        evaluator.update([{**boxes, "keypoints": torch.zeros(1, 17, 3)}], [dict(image_id=1)])


def test_report_has_the_pck_of_each_point(tmp_path):
    dataset = ShapesDetection(8, keypoints=True)
    evaluator = CocoEvaluator(dataset, iou_types=["bbox", "keypoints"])
    for index in range(8):
        target = dataset[index]["target"]
        centers, sides = (target["boxes_cxcywh"] * 128).split(2, dim=1)
        moved = target["keypoints"].clone()
        moved[:, 1, 0] += 128  # the rightmost points are far off
        prediction = dict(
            boxes_xyxy=torch.cat([centers - sides / 2, centers + sides / 2], 1),
            labels=target["labels"],
            scores=torch.linspace(0.5, 0.9, len(sides)),
            keypoints=moved,
        )
        evaluator.update([prediction], [target])
    metrics = evaluator.compute()
    assert metrics["keypoints/PCK"] == pytest.approx(3 / 4)
    page = write_report(evaluator, tmp_path / "report.html", title="points").read_text()
    count = dataset.ground_truth()["annotations"]
    assert re.search(rf"right</t[hd]>\s*<td[^>]*>{len(count)}</td>\s*<td[^>]*>0.000", page)
    assert "0.750 of all points" in page
    image = json.loads(re.search(r'class="data">(.*?)</script>', page, re.S)[1])["images"][0]
    first = dataset.ground_truth()["annotations"][0]
    x, y = first["keypoints"][:2]
    lines = image["masks"][0]  # a box, four limbs, and a square around each of four points
    assert [len(line) for line in lines] == [8, 4, 4, 4, 4, 8, 8, 8, 8]
    assert lines[1][:2] == pytest.approx([x, y], abs=0.06) and len(image["predicted_masks"][0]) == 9
    assert evaluator.score_thresholds().overall < 0.9
