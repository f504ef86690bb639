"""Panoptic quality: cases worked by hand, and random ones against a calculation by masks."""

import json

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from PIL import Image

from vitkit import distributed
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import base as base_module
from vitkit.evaluation.panoptic import PanopticEvaluator, match_segments
from vitkit.registry import EVALUATORS
from vitkit.structures import PanopticMap

CLASSES, CATEGORY_IDS, THINGS = ["cat", "sky", "dog"], [17, 187, 18], [True, False, True]


def segments(*rows):
    """Return segments from rows of (id, label) or (id, label, iscrowd)."""
    return [dict(id=row[0], label=row[1], iscrowd=len(row) > 2) for row in rows]


def line(*runs):
    """Return a map with a single row from runs of (id, number of pixels)."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in runs])[None]


def dataset_of(truths):
    """Return a dataset from image id -> (map, segments)."""
    maps = [PanopticMap(*truth) for truth in truths.values()]
    return PlainDataset(
        annotations=["panoptic"],
        classes=CLASSES,
        category_ids=CATEGORY_IDS,
        things=THINGS,
        image_ids=list(truths),
        load_panoptic=maps.__getitem__,
    )


def predicted(ids, found):
    scored = [{"id": s["id"], "label": s["label"], "score": 0.5} for s in found]
    return dict(panoptic=torch.from_numpy(ids), segments_info=scored)


def run(dataset, predictions):
    evaluator = EVALUATORS.build("PanopticEvaluator", dataset=dataset)
    for image_id, prediction in predictions.items():
        evaluator.update([predicted(*prediction)], [dict(image_id=image_id)])
    evaluator.gather()
    return evaluator, evaluator.compute()


# Twenty pixels: ten of a cat, eight of sky, two void.
TRUTH = line((1, 10), (2, 8), (0, 2)), segments((1, 0), (2, 1))


def test_quality_of_a_case_by_hand():
    # The cat: 6 right pixels and 2 in void, IoU 6 / (10 + 6). The sky: 4 of 8, IoU 4 / 12. A second cat of one pixel.
    found = line((5, 6), (6, 8), (7, 1), (0, 3), (5, 2)), segments((5, 0), (6, 1), (7, 0))
    evaluator, metrics = run(dataset_of({3: TRUTH}), {3: found})
    assert metrics == pytest.approx(
        dict(
            PQ=(0.6 / 1.5 + 0) / 2,
            SQ=(0.6 + 0) / 2,
            RQ=(1 / 1.5 + 0) / 2,
            PQ_things=0.6 / 1.5,
            SQ_things=0.6,
            RQ_things=1 / 1.5,
            PQ_stuff=0,
            SQ_stuff=0,
            RQ_stuff=0,
        )
    )
    assert evaluator.per_class() == pytest.approx({"cat": 0.4, "sky": 0, "dog": -1})
    assert evaluator.table().splitlines()[1:] == [
        "all        20.0   30.0   33.3        2",
        "things     40.0   60.0   66.7        1",
        "stuff       0.0    0.0    0.0        1",
    ]


def test_an_iou_of_one_half_is_no_match():
    found = line((5, 5), (0, 15)), segments((5, 0))
    _, metrics = run(dataset_of({3: TRUTH}), {3: found})
    assert metrics["PQ_things"] == 0
    found = line((5, 6), (0, 14)), segments((5, 0))
    _, metrics = run(dataset_of({3: TRUTH}), {3: found})
    assert metrics["PQ_things"] == pytest.approx(0.6)


def counts(truth, found):
    """Return the numbers of matches, unmatched predictions and unmatched true segments, over all classes."""
    return match_segments(PanopticMap(*truth), PanopticMap(*found), 3).sum(axis=0)[1:].tolist()


def test_segments_mostly_in_void_are_not_wrong():
    truth = line((0, 10), (1, 10)), segments((1, 1))
    for in_void, wrong in ((6, 0), (5, 1)):
        found = line((0, 10 - in_void), (5, 10), (0, in_void)), segments((5, 0))
        assert counts(truth, found) == [0, wrong, 1]


def test_segments_mostly_in_the_crowd_of_their_class_are_not_wrong():
    truth = line((1, 10), (2, 10)), segments((1, 0, True), (2, 1))
    inside = line((5, 8), (2, 2), (6, 10))
    assert counts(truth, (inside, segments((5, 0), (2, 1), (6, 1)))) == [1, 1, 0]
    assert counts(truth, (inside, segments((5, 2), (2, 1), (6, 1)))) == [1, 2, 0]  # a dog in a crowd of cats
    # A crowd is neither missed nor matched, however well it is covered.
    exact = line((1, 10), (2, 10)), segments((1, 0), (2, 1))
    assert counts(truth, exact) == [1, 0, 0]


def test_segment_mostly_in_void_and_crowd_together_is_not_wrong():
    truth = line((0, 3), (1, 3), (2, 14)), segments((1, 0, True), (2, 1))
    found = line((5, 10), (6, 10)), segments((5, 0), (6, 1))
    assert counts(truth, found) == [1, 0, 0]
    truth = line((0, 3), (1, 2), (2, 15)), segments((1, 0, True), (2, 1))
    assert counts(truth, found) == [1, 1, 0]


def random_maps(rng):
    """A true and a predicted map of blocks, partly equal, with void and crowds."""
    blocks = rng.integers(0, 7, (6, 8))
    changed = np.where(rng.random(blocks.shape) < 0.3, rng.integers(0, 7, blocks.shape), blocks)
    labels = rng.integers(0, 3, 7)
    maps = []
    for source, crowds in ((blocks, True), (changed, False)):
        ids = np.kron(source, np.ones((3, 3), np.int32)).astype(np.int32) * 1000
        listed = [i for i in np.unique(ids) if i]
        info = [dict(id=int(i), label=int(labels[i // 1000]), iscrowd=crowds and int(i) == 3000) for i in listed]
        maps.append(PanopticMap(ids, info))
    return maps


def by_masks(truth, found):
    """Compute the same numbers from each pair of masks, by the paper and COCO's rules."""
    result = np.zeros((3, 4))
    void = truth.panoptic == 0
    left_true = {s["id"] for s in truth.segments_info if not s["iscrowd"]}
    left_found = {s["id"] for s in found.segments_info}
    for t in truth.segments_info:
        for f in found.segments_info:
            a, b = truth.panoptic == t["id"], (found.panoptic == f["id"]) & ~void
            iou = (a & b).sum() / (a | b).sum()
            if not t["iscrowd"] and t["label"] == f["label"] and iou > 0.5:
                result[t["label"]] += iou, 1, 0, 0
                left_true.remove(t["id"])
                left_found.remove(f["id"])
    for t in truth.segments_info:
        result[t["label"], 3] += t["id"] in left_true
    for f in found.segments_info:
        inside = found.panoptic == f["id"]
        excused = void.copy()
        for t in truth.segments_info:
            if t["iscrowd"] and t["label"] == f["label"]:
                excused |= truth.panoptic == t["id"]
        if f["id"] in left_found and (inside & excused).sum() <= 0.5 * inside.sum():
            result[f["label"], 2] += 1
    return result


def test_random_maps_score_as_in_a_computation_with_masks():
    rng = np.random.default_rng(0)
    total = np.zeros(4)
    for _ in range(60):
        truth, found = random_maps(rng)
        expected = by_masks(truth, found)
        np.testing.assert_allclose(match_segments(truth, found, 3), expected, rtol=1e-12)
        total += expected.sum(axis=0)
    assert (total > 20).all()


def test_an_image_without_prediction_counts_as_missed(caplog):
    truths = {3: TRUTH, 4: TRUTH}
    _, metrics = run(dataset_of(truths), {3: TRUTH})
    assert metrics["PQ"] == pytest.approx(1 / 1.5) and metrics["SQ"] == 1
    assert "1 of 2 images have no prediction" in caplog.text


def test_quality_is_undefined_without_segments():
    empty = line((0, 5)), []
    _, metrics = run(dataset_of({3: empty}), {3: empty})
    assert set(metrics.values()) == {-1.0}


def random_dataset():
    rng = np.random.default_rng(1)
    maps = {image_id: random_maps(rng) for image_id in (8, 2, 700000)}
    return dataset_of({i: truth for i, (truth, _) in maps.items()}), {i: found for i, (_, found) in maps.items()}


def test_two_ranks_equal_one_process_despite_a_repeated_image(monkeypatch):
    dataset, predictions = random_dataset()
    _, expected = run(dataset, predictions)
    ranks = [PanopticEvaluator(dataset), PanopticEvaluator(dataset)]
    for position, image_id in enumerate([8, 2, 700000, 8]):
        ranks[position % 2].update([predicted(*predictions[image_id])], [dict(image_id=image_id)])
    answers = [rank.stored_predictions for rank in ranks]
    monkeypatch.setattr(distributed, "gather_objects", lambda item: answers if isinstance(item, dict) else [1])
    ranks[0].gather()
    assert ranks[0].compute() == expected
    monkeypatch.setattr(base_module, "is_main", lambda: False)
    assert ranks[1].compute() == {} and ranks[1].table() == "" and ranks[1].per_class() == {}


def test_written_results_have_the_coco_format_and_score_the_same(tmp_path):
    dataset, predictions = random_dataset()
    evaluator, expected = run(dataset, predictions)
    written = evaluator.write_results(tmp_path / "results.json")
    assert written == [tmp_path / "results.json", tmp_path / "results"]
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["categories"][0] == {"id": 17, "name": "cat", "isthing": 1}
    annotation = content["annotations"][-1]
    assert (annotation["image_id"], annotation["file_name"]) == (700000, "000000700000.png")
    colors = np.asarray(Image.open(tmp_path / "results" / "000000700000.png")).astype(int)
    ids, info = predictions[700000]
    assert np.array_equal(colors @ [1, 256, 65536], ids)
    assert annotation["segments_info"] == [
        {"id": s["id"], "category_id": CATEGORY_IDS[s["label"]], "score": 0.5} for s in info
    ]
    for path in written:
        again = PanopticEvaluator(dataset)
        again.load_results(path)
        assert again.compute() == expected


def write_wrong(folder, change):
    dataset, predictions = random_dataset()
    evaluator, _ = run(dataset, predictions)
    evaluator.write_results(folder / "results.json")
    content = json.loads((folder / "results.json").read_text())
    change(content["annotations"][0])
    (folder / "results.json").write_text(json.dumps(content))
    return PanopticEvaluator(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(image_id=1), "image_id 1; expected one of the 3 image_ids of the dataset"),
        (
            lambda a: a["segments_info"][0].update(category_id=1),
            "image 2: segment 1000 has category_id 1; expected one of",
        ),
        (lambda a: a["segments_info"].pop(), r"segment ids \[6000\] are in the predicted map and not in segments_info"),
        (lambda a: a["segments_info"].append({"id": 9, "category_id": 17}), r"\[9\] are in segments_info and not in"),
        (lambda a: a.update(file_name="x.png"), "cannot read .*x.png"),
        (lambda a: a.pop("file_name"), "image 2 has no 'file_name'"),
        (lambda a: a.update(image_id=[2]), r"image_id \[2\]; expected one of the 3"),
        (lambda a: a.update(image_id=8), "image_id 8; expected an id that no earlier entry has"),
        (lambda a: a.update(segments_info=[7]), r"image 2 has segments_info \[7\]; expected only objects"),
        (lambda a: a["segments_info"][0].pop("id"), "image 2: segment None has no 'id'"),
    ],
)
def test_wrong_results_are_errors(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        evaluator = write_wrong(tmp_path, change)
        evaluator.load_results(tmp_path / "results.json")


def test_empty_results_are_an_error(tmp_path):
    evaluator = PanopticEvaluator(random_dataset()[0])
    with pytest.raises(DataError, match="results: no file"):
        evaluator.load_results(tmp_path / "results.json")
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(DataError, match="the file contains .*; expected panoptic results"):
        evaluator.load_results(tmp_path / "results.json")


def test_wrong_predictions_are_errors():
    evaluator = PanopticEvaluator(dataset_of({3: TRUTH}))
    target = [dict(image_id=3)]
    with pytest.raises(DataError, match="predicted labels 0 to 3, but the dataset has 3 classes"):
        evaluator.update([predicted(line((1, 10), (2, 10)), segments((1, 0), (2, 3)))], target)
    with pytest.raises(DataError, match="image 3: the predicted map is 19x1 pixels .* and the true one 20x1"):
        evaluator.update([predicted(line((1, 19)), segments((1, 0)))], target)
    with pytest.raises(ConfigError, match="needs 'panoptic', but the model predicts semantic. Set model.tasks"):
        evaluator.update([dict(semantic=torch.zeros(1, 20))], target)
    with pytest.raises(ConfigError, match="needs 'panoptic' annotations, and dataset PlainDataset has 'objects'"):
        PanopticEvaluator(PlainDataset(annotations=["objects"]))


def test_official_sample_matches_itself(shared_data):
    folder = shared_data / "panoptic_sample"
    dataset = CocoPanoptic(
        str(folder / "images"),
        str(folder / "annotations" / "panoptic_examples"),
        str(folder / "annotations" / "panoptic_examples.json"),
    )
    maps = {image_id: dataset.load_panoptic(index) for index, image_id in enumerate(dataset.image_ids.tolist())}
    evaluator, metrics = run(dataset, maps)
    assert metrics["PQ"] == metrics["PQ_things"] == metrics["PQ_stuff"] == 1.0
    num_crowds = sum(s["iscrowd"] for found in maps.values() for s in found.segments_info)
    assert sum(answer.matches[:, 1].sum() for answer in evaluator.stored_predictions.values()) == 50 - num_crowds
    # Without things and with every second column of stuff, no thing is detected, and at most half of the stuff.
    halves = {}
    for image_id, (ids, found) in maps.items():
        ids = ids.copy()
        ids[:, ::2] = 0
        stuff = [s for s in found if not dataset.things[s["label"]] and (ids == s["id"]).any()]
        ids[~np.isin(ids, [s["id"] for s in stuff])] = 0
        halves[image_id] = (ids, stuff)
    _, metrics = run(dataset, halves)
    assert metrics["PQ_things"] == 0 and metrics["SQ_stuff"] < 0.52
