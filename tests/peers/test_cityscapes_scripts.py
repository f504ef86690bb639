"""Cityscapes' classes, IoU and panoptic quality beside the authors' own scripts, `cityscapesscripts`."""

import contextlib
import io
import json

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.configs.parts.cityscapes import CLASS_OF_ID, THINGS, cityscapes_panoptic, cityscapes_semantic
from vitkit.data.loading.splits import build_dataset
from vitkit.evaluation.panoptic import PanopticEvaluator
from vitkit.evaluation.semantic import SemanticEvaluator
from vitkit.ops.label_maps import ids_to_colors

labels_module = pytest.importorskip("cityscapesscripts.helpers.labels")

pytestmark = pytest.mark.peers

SIZE = (48, 80)
EVERY_ID = [label.id for label in labels_module.labels if label.id >= 0]


@pytest.fixture
def root(tmp_path):
    """Write photos, label ids and instance ids: all 34 ids, groups of things, several objects."""
    rng = np.random.default_rng(0)
    for k in range(12):
        ids = np.zeros(SIZE, np.int64)
        for _ in range(25):
            label = labels_module.id2label[int(rng.choice(EVERY_ID))]
            y, x = rng.integers(0, SIZE[0] - 6), rng.integers(0, SIZE[1] - 6)
            height, width = rng.integers(5, 30, 2)
            is_object = label.hasInstances and rng.random() < 0.7
            ids[y : y + height, x : x + width] = 1000 * label.id + rng.integers(3) if is_object else label.id
        stem = f"ulm_{k:06}_000019"
        for folder, name, values in (
            ("leftImg8bit", "leftImg8bit", np.full((*SIZE, 3), 90, np.uint8)),
            ("gtFine", "gtFine_labelIds", np.where(ids >= 1000, ids // 1000, ids).astype(np.uint8)),
            ("gtFine", "gtFine_instanceIds", ids.astype(np.uint16)),
        ):
            path = tmp_path / folder / "val" / "ulm" / f"{stem}_{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), values)
    return tmp_path


def dataset_of(section, root):
    return build_dataset({**section["val"], "transforms": None}, str(root))


def test_classes_and_things_are_those_that_are_evaluated():
    evaluated = {label.id: label for label in labels_module.labels if not label.ignoreInEval}
    assert {value: label.name for value, label in evaluated.items()} == CLASS_OF_ID
    assert {label.name for label in evaluated.values() if label.hasInstances} == {*THINGS}
    assert [label.trainId for label in evaluated.values()] == list(range(19))  # the order of the classes


def test_iou_of_written_maps_is_that_of_the_official_script(root, tmp_path, monkeypatch):
    monkeypatch.setattr(np, "in1d", np.isin, raising=False)  # which the script uses and NumPy 2.4 has no more
    from cityscapesscripts.evaluation import evalPixelLevelSemanticLabeling as official

    dataset = dataset_of(cityscapes_semantic(), root)
    evaluator = SemanticEvaluator(dataset, boundary=False)
    rng = np.random.default_rng(1)
    absent = dataset.classes.index("wall")  # no prediction has it
    for index, image_id in enumerate(dataset.image_ids):
        truth = dataset.load_semantic(index)
        predicted = np.where(rng.random(SIZE) < 0.6, truth, rng.integers(19, size=SIZE))
        predicted[(predicted == 255) | (predicted == absent)] = 0
        evaluator.update([dict(semantic=torch.from_numpy(predicted).long())], [dict(image_id=image_id)])
    evaluator.gather()
    metrics = evaluator.compute()
    evaluator.write_results(tmp_path / "results.json")  # ids and not "train ids", as the benchmark's server takes them
    predicted = sorted(path for path in tmp_path.rglob("*.png") if "val" not in path.parts)
    truths = sorted(root.rglob("*_labelIds.png"))
    assert len(predicted) == len(truths) == 12
    official.args.quiet, official.args.JSONOutput = True, False
    results = official.evaluateImgLists([str(p) for p in predicted], [str(t) for t in truths], official.args)
    assert metrics["mIoU"] == pytest.approx(results["averageScoreClasses"], abs=1e-12)
    expected = {name: results["classScores"][name] for name in dataset.classes}
    assert evaluator.per_class() == pytest.approx(expected, abs=1e-12) and expected["wall"] == 0


def test_panoptic_quality_is_that_of_the_official_script(root, tmp_path):
    from cityscapesscripts.evaluation.evalPanopticSemanticLabeling import evaluatePanoptic
    from cityscapesscripts.preparation.createPanopticImgs import convert2panoptic

    dataset = dataset_of(cityscapes_panoptic(), root)
    evaluator = PanopticEvaluator(dataset)
    (tmp_path / "official").mkdir()
    (tmp_path / "predicted").mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        convert2panoptic(str(root / "gtFine"), str(tmp_path / "official"), setNames=["val"])
    truth_file = tmp_path / "official" / "cityscapes_panoptic_val.json"
    truth = json.loads(truth_file.read_text())
    rng = np.random.default_rng(2)
    annotations = []
    for index, entry in enumerate(truth["annotations"]):
        ids, segments = dataset.load_panoptic(index)
        official = {s["id"]: (s["category_id"], bool(s["iscrowd"])) for s in entry["segments_info"]}
        category_ids = list(CLASS_OF_ID)
        assert {s["id"]: (category_ids[s["label"]], s["iscrowd"]) for s in segments} == official
        moved = np.roll(ids, rng.integers(-2, 3, 2), (0, 1))
        left_out = [s["id"] for s in segments if rng.random() < 0.1]
        moved[np.isin(moved, left_out)] = 0
        predicted = [
            dict(id=s["id"], label=int(rng.integers(19)) if rng.random() < 0.15 else s["label"])
            for s in segments
            if (moved == s["id"]).any()
        ]
        target = dict(image_id=dataset.image_ids[index])
        evaluator.update([dict(panoptic=torch.from_numpy(moved), segments_info=predicted)], [target])
        name = f"{entry['image_id']}.png"
        Image.fromarray(ids_to_colors(moved)).save(tmp_path / "predicted" / name)
        infos = [dict(id=s["id"], category_id=category_ids[s["label"]]) for s in predicted]
        annotations.append(dict(image_id=entry["image_id"], file_name=name, segments_info=infos))
    (tmp_path / "predicted.json").write_text(json.dumps(dict(annotations=annotations)))
    evaluator.gather()
    metrics = evaluator.compute()
    files = truth_file, truth_file.with_suffix(""), tmp_path / "predicted.json", tmp_path / "predicted"
    with contextlib.redirect_stdout(io.StringIO()):
        expected = evaluatePanoptic(*map(str, files), str(tmp_path / "results.json"))
    for suffix, group in (("", "All"), ("_things", "Things"), ("_stuff", "Stuff")):
        got = [metrics[name + suffix] for name in ("PQ", "SQ", "RQ")]
        assert got == pytest.approx([expected[group][name] for name in ("pq", "sq", "rq")], abs=1e-12)
    assert 0.2 < metrics["PQ"] < 0.8
