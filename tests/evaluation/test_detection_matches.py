"""Precision and recall are those of pycocotools to the last bit, and the matches of any ranks' images add up."""

import contextlib
import io

import numpy as np
import pytest
from helpers.plain_dataset import PlainDataset
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitkit import distributed
from vitkit.evaluation import base as base_module
from vitkit.evaluation import coco as coco_module
from vitkit.evaluation.coco import CocoEvaluator, metric_names, to_results
from vitkit.evaluation.detection_matches import Predictions

SIDE = 120


def rectangle(box):
    mask = np.zeros((SIDE, SIDE), np.uint8, order="F")
    x, y, width, height = (int(value) for value in box)
    mask[y : y + height, x : x + width] = 1
    rle = coco_mask.encode(mask)
    return {"size": rle["size"], "counts": rle["counts"].decode()}


def random_case(seed):
    """Return a dataset and answers on a coarse grid with few scores, so that IoUs and scores tie; also crowds, images
    without objects or answers, classes without either, and ids with gaps."""
    rng = np.random.default_rng(seed)
    category_ids = rng.permutation([2, 5, 9, 30]).tolist()
    images = [dict(id=int(k), width=SIDE, height=SIDE) for k in rng.permutation(40)[:12]]

    def box():
        return [*(10.0 * rng.integers(0, 5, 2)).tolist(), *(10.0 * rng.integers(1, 7, 2)).tolist()]

    annotations, answers = [], {}
    for image in images:
        for _ in range(rng.integers(0, 9)):
            xywh = box()
            annotations.append(
                dict(
                    id=len(annotations), image_id=image["id"], category_id=int(rng.choice(category_ids[:3])), bbox=xywh,
                    area=xywh[2] * xywh[3] * rng.choice([1, 0.5]), iscrowd=int(rng.random() < 0.2),
                    segmentation=rectangle(xywh),
                )
            )  # fmt: skip
        if rng.random() < 0.85:
            boxes = np.array([box() for _ in range(rng.integers(1, 30))], np.float32)
            scores = (rng.integers(1, 8, len(boxes)) / 8).astype(np.float32)
            answers[image["id"]] = Predictions(
                rng.choice(category_ids, len(boxes)), boxes, scores, [rectangle(xywh) for xywh in boxes]
            )
    categories = [dict(id=raw, name=str(raw)) for raw in category_ids]
    dataset = PlainDataset(
        annotations=["objects"],
        classes=[str(raw) for raw in category_ids],
        category_ids=category_ids,
        image_ids=[image["id"] for image in images],
        ground_truth=lambda: dict(images=images, annotations=annotations, categories=categories),
    )
    return dataset, answers


def official(dataset, answers, iou_type, max_dets):
    truth, results = dataset.ground_truth(), to_results(answers)
    area = {"bbox": lambda r: r["bbox"][2] * r["bbox"][3], "segm": lambda r: coco_mask.area(r["segmentation"])}

    def indexed(entries):
        coco = COCO()
        coco.dataset = {**truth, "annotations": [{**entry, "id": k} for k, entry in enumerate(entries, start=1)]}
        coco.createIndex()
        return coco

    with contextlib.redirect_stdout(io.StringIO()):
        detected = [{**result, "area": area[iou_type](result), "iscrowd": 0} for result in results]
        evaluation = COCOeval(indexed(truth["annotations"]), indexed(detected), iou_type)
        evaluation.params.maxDets = list(max_dets)
        evaluation.evaluate()
        evaluation.accumulate()
    order = [evaluation.params.catIds.index(raw) for raw in dataset.category_ids]
    return evaluation.eval["precision"][..., -1][:, :, order], evaluation.eval["recall"][:, order]


@pytest.mark.parametrize("max_dets", [(1, 10, 100), (1, 2, 3)])
@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(8))
def test_precision_and_recall_are_those_of_pycocotools(seed, iou_type, max_dets):
    dataset, answers = random_case(seed)
    evaluator = CocoEvaluator(dataset, iou_types=[iou_type], max_dets=max_dets)
    evaluator.stored_predictions = answers
    evaluator.compute()
    precision, recall = evaluator.statistics().matches.precision_and_recall()
    expected = official(dataset, answers, iou_type, max_dets)
    assert np.array_equal(recall, expected[1])
    assert np.array_equal(precision, expected[0])


@pytest.mark.parametrize("seed", range(3))
def test_each_rank_matches_its_own_images(seed, monkeypatch):
    dataset, answers = random_case(seed)
    alone = CocoEvaluator(dataset, iou_types=["bbox", "segm"])
    alone.stored_predictions = dict(answers)
    expected = alone.compute()

    ids = sorted(answers)
    ranks = [CocoEvaluator(dataset, iou_types=["bbox", "segm"]) for _ in range(2)]
    for rank, evaluator in enumerate(ranks):
        evaluator.stored_predictions = {
            image_id: answers[image_id] for image_id in [*ids[rank::2], ids[0]]
        }  # one is repeated
    sent = []
    monkeypatch.setattr(distributed, "is_main", lambda: True)
    for module in (base_module, coco_module):
        monkeypatch.setattr(module, "gather_dicts", lambda entries: sent.append(dict(entries)) or {})
    monkeypatch.setattr(coco_module, "world_size", lambda: 2)
    for evaluator in ranks:
        evaluator.gather()
    first, second = sent[: len(sent) // 2], sent[len(sent) // 2 :]
    replies = iter([{**b, **a} for a, b in zip(first, second)])
    for module in (base_module, coco_module):
        monkeypatch.setattr(module, "gather_dicts", lambda entries: next(replies))
    main = CocoEvaluator(dataset, iou_types=["bbox", "segm"])
    main.gather()
    monkeypatch.setattr(coco_module, "match_image", None)  # nothing is left to match
    assert main.compute() == expected
    assert list(expected) == [f"{iou_type}/{name}" for iou_type in ("bbox", "segm") for name in metric_names()]
