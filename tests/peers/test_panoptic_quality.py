"""PanopticEvaluator beside panopticapi, torchmetrics and the expected values of mmdetection and torchmetrics."""

import json

import numpy as np
import pytest
import torch
from peers.panoptic_cases import CATEGORY_IDS, THINGS, dataset_of, evaluate, perturbed, random_truth, write_panoptic
from PIL import Image

from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.ops.label_maps import ids_to_colors
from vitkit.structures import PanopticMap

pytestmark = pytest.mark.peers


def test_qualities_of_500_perturbed_maps_are_those_of_panopticapi(tmp_path):
    evaluation = pytest.importorskip("panopticapi.evaluation", reason="pip install --no-deps panopticapi-lite")
    rng = np.random.default_rng(0)
    truths = {image_id: random_truth(rng) for image_id in range(1, 501)}
    predictions = {image_id: perturbed(rng, truth) for image_id, truth in truths.items()}
    categories = {i: dict(id=i, isthing=int(thing)) for i, thing in zip(CATEGORY_IDS, THINGS)}
    true_annotations = write_panoptic(tmp_path / "truth", truths)
    predicted_annotations = write_panoptic(tmp_path / "predicted", predictions)
    statistics = evaluation.pq_compute_single_core(
        0,
        list(zip(true_annotations, predicted_annotations)),
        str(tmp_path / "truth"),
        str(tmp_path / "predicted"),
        categories,
    )
    metrics, by_class = evaluate(dataset_of(truths), predictions)
    for suffix, isthing in (("", None), ("_things", True), ("_stuff", False)):
        expected, of_classes = statistics.pq_average(categories, isthing=isthing)
        got = [metrics[name + suffix] for name in ("PQ", "SQ", "RQ")]
        assert got == pytest.approx([expected[name] for name in ("pq", "sq", "rq")], abs=1e-12)
        assert 0.1 < expected["pq"] < 0.9  # neither perfect nor hopeless
        for category_id, numbers in of_classes.items():
            assert by_class[f"class {category_id}"] == pytest.approx(numbers["pq"], abs=1e-12)
    counts = np.array([(s.tp, s.fp, s.fn) for s in (statistics[i] for i in CATEGORY_IDS)])
    assert (counts > 100).all()


def test_qualities_of_panopticapis_sample_are_its_own(tmp_path, shared_data):
    """Its two photos, moved by 10 pixels, and with every fourth segment left out."""
    evaluation = pytest.importorskip("panopticapi.evaluation", reason="pip install --no-deps panopticapi-lite")
    folder = shared_data / "panoptic_sample" / "annotations"
    sample = json.loads((folder / "panoptic_examples.json").read_text())
    dataset = CocoPanoptic(
        str(folder.parent / "images"), str(folder / "panoptic_examples"), str(folder / "panoptic_examples.json")
    )
    categories = {category["id"]: category for category in sample["categories"]}
    (tmp_path / "predicted").mkdir()
    predictions, annotations = {}, []
    for position, image_id in enumerate(dataset.image_ids.tolist()):
        truth = dataset.load_panoptic(position)
        ids = np.roll(truth.panoptic, 10, 1)
        ids[np.isin(ids, np.unique(ids)[::4])] = 0
        segments = [dict(id=s["id"], label=s["label"]) for s in truth.segments_info if (ids == s["id"]).any()]
        predictions[image_id] = ids, segments
        Image.fromarray(ids_to_colors(ids)).save(tmp_path / "predicted" / f"{image_id}.png")
        infos = [dict(id=s["id"], category_id=int(dataset.category_ids[s["label"]])) for s in segments]
        annotations.append(dict(image_id=image_id, file_name=f"{image_id}.png", segments_info=infos))
    by_id = {annotation["image_id"]: annotation for annotation in sample["annotations"]}
    pairs = [(by_id[annotation["image_id"]], annotation) for annotation in annotations]
    statistics = evaluation.pq_compute_single_core(
        0, pairs, str(folder / "panoptic_examples"), str(tmp_path / "predicted"), categories
    )
    metrics, _ = evaluate(dataset, predictions)
    for suffix, isthing in (("", None), ("_things", True), ("_stuff", False)):
        expected, _ = statistics.pq_average(categories, isthing=isthing)
        got = [metrics[name + suffix] for name in ("PQ", "SQ", "RQ")]
        assert got == pytest.approx([expected[name] for name in ("pq", "sq", "rq")], abs=1e-12)
        assert 0.1 < expected["pq"] < 0.9


def test_qualities_of_perturbed_maps_are_those_of_torchmetrics():
    detection = pytest.importorskip("torchmetrics.detection")
    rng = np.random.default_rng(1)
    truths = {image_id: random_truth(rng, crowds=0) for image_id in range(1, 41)}
    # torchmetrics has one segment for each class of stuff. It also treats void pixels of the prediction like those of
    # the truth, left out of unions and excusing missed segments, which neither the paper nor panopticapi do: here, no
    # prediction has any.
    truths = {image_id: one_segment_per_stuff_class(*truth) for image_id, truth in truths.items()}
    predictions = {
        image_id: tuple(one_segment_per_stuff_class(*without_void(*perturbed(rng, truth))))
        for image_id, truth in truths.items()
    }
    void, labels = len(CATEGORY_IDS), range(len(CATEGORY_IDS))
    metric = detection.PanopticQuality(
        things={label for label in labels if THINGS[label]},
        stuffs={label for label in labels if not THINGS[label]},
        allow_unknown_preds_category=True,
        return_sq_and_rq=True,
    )

    def pairs(ids, segments):
        label_map = np.full(ids.shape, void)
        for segment in segments:
            label_map[ids == segment["id"]] = segment["label"]
        return torch.from_numpy(np.stack([label_map, ids], axis=-1)).long()[None]

    for image_id, truth in truths.items():
        metric.update(pairs(*predictions[image_id]), pairs(*truth))
    metrics, _ = evaluate(dataset_of(truths), predictions)
    assert [metrics["PQ"], metrics["SQ"], metrics["RQ"]] == pytest.approx(metric.compute().tolist(), abs=1e-6)


def without_void(ids, segments):
    if (ids > 0).all():
        return ids, segments
    number = max(segment["id"] for segment in segments) + 1
    return np.where(ids > 0, ids, np.int32(number)), [*segments, dict(id=number, label=THINGS.index(False))]


def one_segment_per_stuff_class(ids, segments):
    ids, kept = ids.copy(), {}
    for segment in segments:
        key = segment["id"] if THINGS[segment["label"]] else -segment["label"]
        ids[ids == segment["id"]] = kept.setdefault(key, segment)["id"]
    return PanopticMap(ids, list(kept.values()))


def test_qualities_are_those_that_mmdetections_test_expects():
    """`test_coco_panoptic_metric.py` of mmdetection (Apache-2.0, commit 3cbdf31): one image of 60 by 80 pixels."""
    true_boxes = [(10, 10, 10, 40), (30, 10, 10, 40), (50, 10, 10, 5)]  # xywh of two persons and a dog
    predicted_boxes = [(11, 11, 10, 40), (38, 10, 10, 40), (51, 10, 10, 5)]
    person, dog, wall = range(3)

    def drawn(boxes):
        ids = np.full((60, 80), 4, np.int32)
        for number, (x, y, width, height) in enumerate(boxes, start=1):
            ids[y : y + height, x : x + width] = number
        return ids, [dict(id=i, label=label) for i, label in enumerate((person, person, dog, wall), start=1)]

    dataset = dataset_of({0: PanopticMap(*drawn(true_boxes))}, category_ids=[0, 2, 3], things=[True, True, False])
    metrics, _ = evaluate(dataset, {0: drawn(predicted_boxes)})
    expected = {
        **{"PQ": 67.86874803219071, "SQ": 80.89770126158936, "RQ": 83.33333333333334},
        **{"PQ_things": 60.45252075318891, "SQ_things": 79.9959505972869, "RQ_things": 75.0},
        **{"PQ_stuff": 82.70120259019427, "SQ_stuff": 82.70120259019427, "RQ_stuff": 100.0},
    }
    assert {name: 100 * value for name, value in metrics.items()} == pytest.approx(expected, abs=1e-12)


def test_quality_is_that_of_torchmetrics_own_test():
    """`test_panoptic_quality.py` of torchmetrics (Apache-2.0, commit 0a0dd45): PQ of things 0 and 1, stuff 6 and 7."""
    # As (class, instance), where only things have instances.
    predicted = "60 00 60 60 01, 00 00 60 01 01, 00 00 60 01 10, 00 70 60 10 10, 00 70 70 70 70"
    true = "60 60 60 60 00, 01 01 60 00 00, 01 01 60 10 10, 01 70 70 10 10, 01 70 70 70 70"

    def read(text):
        codes = np.array([[int(code) for code in row.split()] for row in text.split(",")], np.int32)
        labels = [0, 1, 6, 7]
        return codes + 1, [dict(id=int(c) + 1, label=labels.index(c // 10)) for c in np.unique(codes)]

    dataset = dataset_of({0: PanopticMap(*read(true))}, category_ids=[0, 1, 6, 7], things=[True, True, False, False])
    assert evaluate(dataset, {0: read(predicted)})[0]["PQ"] == pytest.approx(0.7753, abs=5e-5)
