"""IoU and accuracy: cases worked out by hand, and random ones against a calculation by masks."""

import json

import cv2
import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from PIL import Image

from vitkit import distributed
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation import base as base_module
from vitkit.evaluation.maps import near_edge
from vitkit.evaluation.semantic import SemanticEvaluator, boundary_counts
from vitkit.registry import EVALUATORS

CLASSES, CATEGORY_IDS = ["sky", "road", "car", "sea"], [11, 7, 24, 9]


def dataset_of(truths):
    """Return a dataset from image id -> label map."""
    maps = [np.array(labels, np.uint8) for labels in truths.values()]
    return PlainDataset(
        annotations=["semantic"],
        classes=CLASSES,
        category_ids=CATEGORY_IDS,
        image_ids=list(truths),
        load_semantic=maps.__getitem__,
    )


def run(dataset, predictions, **arguments):
    evaluator = EVALUATORS.build(dict(type="SemanticEvaluator", **arguments), dataset=dataset)
    for image_id, labels in predictions.items():
        evaluator.update([dict(semantic=torch.tensor(np.asarray(labels)).long())], [dict(image_id=image_id)])
    evaluator.gather()
    return evaluator, evaluator.compute()


def test_iou_of_a_case_by_hand():
    # sky 4 of 4 right and one pixel of road taken for it; road 2 of 4 right; the ignored pixels do not count.
    dataset = dataset_of({"a/1": [[0, 0, 1, 1], [0, 0, 255, 255]], "b": [[1, 1]]})
    predictions = {"a/1": [[0, 0, 0, 1], [0, 0, 2, 1]], "b": [[1, 3]]}
    evaluator, metrics = run(dataset, predictions, boundary=False)
    assert metrics == pytest.approx(
        dict(mIoU=(4 / 5 + 2 / 4) / 2, pixel_accuracy=6 / 8, mean_accuracy=(4 / 4 + 2 / 4) / 2)
    )
    assert evaluator.per_class() == pytest.approx({"sky": 0.8, "road": 0.5, "car": -1, "sea": -1})
    assert evaluator.table().splitlines() == [
        "class                IoU     accuracy",
        "sky                80.00       100.00",
        "road               50.00        50.00",
        "car                    -            -",
        "sea                    -            -",
        "all classes        65.00        75.00",
        "pixel accuracy 75.00 % of 2 images",
    ]


def test_boundary_iou_compares_only_pixels_near_edges():
    truth = np.zeros((50, 50), np.uint8)
    truth[10:40, 10:40] = 1
    found = np.zeros((50, 50), np.uint8)
    found[10:40, 11:41] = 1  # one column to the right
    # The diagonal is 70.7 pixels, so that boundaries are one pixel wide; those of class 1 are frames of 4 * 29 pixels,
    # which share their upper and lower sides except for a pixel at each end.
    both, near_true, near_found = boundary_counts(truth, found, 4)[:, 1]
    assert (near_true, near_found, both) == (116, 116, 2 * 29)
    _, metrics = run(dataset_of({1: truth}), {1: found})
    # The boundary of class 0: the frame of the image, 4 * 49 pixels, and that around the square, 4 * 30 + 4 (corners).
    frame, around = 4 * 49, 4 * 31
    shared = frame + 2 * 31
    assert metrics["boundary_mIoU"] == pytest.approx(
        (58 / (116 * 2 - 58) + shared / (2 * (frame + around) - shared)) / 2
    )


@pytest.mark.parametrize("distance", [1, 3])
def test_pixels_near_edges_equal_erosion_of_each_class(distance):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (6, 7)).astype(np.uint8).repeat(9, 0).repeat(8, 1)
    labels[labels == 2] = 255
    expected = np.zeros(labels.shape, bool)
    for value in (0, 1, 255):
        mask = cv2.copyMakeBorder((labels == value).astype(np.uint8), 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=0)
        eroded = cv2.erode(mask, np.ones((3, 3), np.uint8), iterations=distance)[1:-1, 1:-1]
        expected |= (labels == value) & (eroded == 0)
    assert np.array_equal(near_edge(labels, distance), expected)


def random_dataset():
    rng = np.random.default_rng(1)
    truths = {
        i: np.where(rng.random((40, 30)) < 0.1, 255, rng.integers(0, 4, (8, 6)).repeat(5, 0).repeat(5, 1))
        for i in (5, 2)
    }
    predictions = {
        i: np.where((rng.random((40, 30)) < 0.3) | (labels == 255), rng.integers(0, 4, (40, 30)), labels)
        for i, labels in truths.items()
    }
    return dataset_of(truths), truths, predictions


def test_random_maps_score_as_in_a_computation_with_masks():
    dataset, truths, predictions = random_dataset()
    _, metrics = run(dataset, predictions)
    truth = np.concatenate([truths[i] for i in truths])
    found = np.where(truth == 255, 255, np.concatenate([predictions[i] for i in truths]))
    ious = [((truth == k) & (found == k)).sum() / ((truth == k) | (found == k)).sum() for k in range(4)]
    recalls = [((truth == k) & (found == k)).sum() / (truth == k).sum() for k in range(4)]
    assert metrics["mIoU"] == pytest.approx(np.mean(ious))
    assert metrics["mean_accuracy"] == pytest.approx(np.mean(recalls))
    assert metrics["pixel_accuracy"] == pytest.approx((truth == found)[truth != 255].mean())
    assert 0 < metrics["boundary_mIoU"] < 1


def test_perfect_predictions_score_one():
    dataset, truths, _ = random_dataset()
    _, metrics = run(dataset, {i: np.where(labels == 255, 0, labels) for i, labels in truths.items()}, boundary=False)
    assert set(metrics.values()) == {1.0}


def test_an_image_without_prediction_counts_as_missed(caplog):
    dataset = dataset_of({1: [[0, 0, 1]], 2: [[0, 0, 1]]})
    _, metrics = run(dataset, {2: [[0, 0, 1]]})
    assert set(metrics.values()) == {0.5}
    assert "1 of 2 images have no prediction" in caplog.text


def test_metrics_are_undefined_without_labeled_pixels():
    _, metrics = run(dataset_of({1: [[255, 255]]}), {1: [[0, 0]]})
    assert set(metrics.values()) == {-1.0}


def test_two_ranks_equal_one_process_despite_a_repeated_image(monkeypatch):
    dataset, _, predictions = random_dataset()
    _, expected = run(dataset, predictions)
    ranks = [SemanticEvaluator(dataset), SemanticEvaluator(dataset)]
    for position, image_id in enumerate([5, 2, 2]):
        prediction = dict(semantic=torch.from_numpy(predictions[image_id]))
        ranks[position % 2].update([prediction], [dict(image_id=image_id)])
    answers = [rank.stored_predictions for rank in ranks]
    monkeypatch.setattr(distributed, "gather_objects", lambda item: answers if isinstance(item, dict) else [1])
    ranks[0].gather()
    assert ranks[0].compute() == expected
    monkeypatch.setattr(base_module, "is_main", lambda: False)
    assert ranks[1].compute() == {} and ranks[1].table() == "" and ranks[1].per_class() == {}


def test_written_maps_contain_raw_ids_and_score_the_same(tmp_path):
    dataset, _, predictions = random_dataset()
    evaluator, expected = run(dataset, predictions)
    written = evaluator.write_results(tmp_path / "results.json")
    assert written == [tmp_path / "results.json", tmp_path / "results"]
    image = np.asarray(Image.open(tmp_path / "results" / "000000000005.png"))
    assert np.array_equal(image, np.array(CATEGORY_IDS)[predictions[5]])
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["mIoU"] == expected["mIoU"] and content["classes"][2]["name"] == "car"
    for path in written:
        again = SemanticEvaluator(dataset)
        again.load_results(path)
        assert again.compute() == expected


def test_maps_in_subfolders_and_with_large_ids_are_written(tmp_path):
    dataset = dataset_of({"ulm/1": [[0, 1]]})
    dataset.category_ids = [300, 7, 24, 9]
    evaluator, expected = run(dataset, {"ulm/1": [[0, 0]]})
    evaluator.write_results(tmp_path / "results.json")
    assert np.asarray(Image.open(tmp_path / "results" / "ulm" / "1.png")).tolist() == [[300, 300]]
    again = SemanticEvaluator(dataset)
    again.load_results(tmp_path / "results")
    assert again.compute() == expected


def test_wrong_results_are_errors(tmp_path):
    dataset = dataset_of({1: [[0, 1]], 2: [[0, 1]]})
    with pytest.raises(DataError, match=r"has no prediction for any of 2 images; expected PNG .*000000000001.png"):
        SemanticEvaluator(dataset).load_results(tmp_path)
    Image.fromarray(np.array([[11, 12]], np.uint8)).save(tmp_path / "000000000001.png")
    with pytest.raises(DataError, match="value 12 at 1 pixels is not a category id of the dataset"):
        SemanticEvaluator(dataset).load_results(tmp_path)
    Image.fromarray(np.arange(6, dtype=np.uint8).reshape(1, 2, 3)).save(tmp_path / "000000000001.png")
    with pytest.raises(DataError, match="mode RGB .*; expected one channel"):
        SemanticEvaluator(dataset).load_results(tmp_path)


def test_wrong_predictions_are_errors():
    evaluator = SemanticEvaluator(dataset_of({1: [[0, 1]]}))
    with pytest.raises(DataError, match="predicted classes 0 to 4, but the dataset has 4 classes"):
        evaluator.update([dict(semantic=torch.tensor([[0, 4]]))], [dict(image_id=1)])
    with pytest.raises(DataError, match="the predicted map is 3x1 pixels .* and the true one 2x1"):
        evaluator.update([dict(semantic=torch.tensor([[0, 1, 1]]))], [dict(image_id=1)])
    with pytest.raises(ConfigError, match="needs 'semantic', but the model predicts panoptic"):
        evaluator.update([dict(panoptic=torch.tensor([[0]]))], [dict(image_id=1)])
    with pytest.raises(ConfigError, match="needs 'semantic' annotations, and dataset PlainDataset has none"):
        SemanticEvaluator(PlainDataset())
