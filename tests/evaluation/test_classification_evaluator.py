"""Accuracies by hand, each image counted once, and what is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from helpers.processes import on_ranks
from matplotlib.figure import Figure
from PIL import Image

from vitkit.apps.visualization.colors import text_color
from vitkit.apps.visualization.metrics import draw_confusion_matrix, draw_metrics
from vitkit.distributed import rank
from vitkit.errors import DataError
from vitkit.evaluation.classification import ClassificationEvaluator
from vitkit.registry import EVALUATORS

CLASSES = ["a", "b", "c", "d", "e", "f", "g"]


def dataset_of(num_images):
    return PlainDataset(annotations=["label"], classes=CLASSES, image_ids=[f"{i}.png" for i in range(num_images)])


def scores_of(*order):
    """Return scores that rank the given classes first, in this order, and the others after them."""
    scores = torch.zeros(len(CLASSES))
    for place, name in enumerate(order):
        scores[CLASSES.index(name)] = 1.0 - 0.1 * place
    return {"class_scores": scores / scores.sum()}


def target_of(image, name):
    return {"image_id": f"{image}.png", "label": CLASSES.index(name)}


IMAGES = [
    (scores_of("a", "b", "c", "d", "e"), target_of(0, "a")),
    (scores_of("b", "a", "c", "d", "e"), target_of(1, "a")),
    (scores_of("b", "c", "d", "e", "f"), target_of(2, "a")),
    (scores_of("g", "f", "e", "d", "c"), target_of(3, "c")),
]
"""The correct class is ranked first; second; not among the first five; fifth."""


def fed(images, num_images) -> ClassificationEvaluator:
    evaluator = EVALUATORS.build("ClassificationEvaluator", dataset=dataset_of(num_images))
    for start in range(0, len(images), 3):
        evaluator.update(*zip(*images[start : start + 3]))
    evaluator.gather()
    return evaluator


def test_top_1_and_top_5_by_hand():
    evaluator = fed(IMAGES, 4)
    assert evaluator.compute() == {"top1": 1 / 4, "top5": 3 / 4}
    expected = np.zeros((7, 7), int)
    expected[0, 0], expected[0, 1], expected[2, 6] = 1, 2, 1
    assert np.array_equal(evaluator.confusion_matrix(), expected)
    assert evaluator.per_class() == {"a": pytest.approx(1 / 3), "b": -1, "c": 0, "d": -1, "e": -1, "f": -1, "g": -1}
    lines = evaluator.table().splitlines()
    assert lines[0] == "top-1 accuracy 0.2500   top-5 accuracy 0.7500   4 images, 7 classes"
    assert lines[1:] == ["  2 of 3 a taken for b", "  1 of 1 c taken for g"]


def test_an_image_counts_once_and_a_missing_one_as_wrong(caplog):
    evaluator = fed([*IMAGES, (scores_of("a"), target_of(1, "a"))], 5)
    assert evaluator.compute() == {"top1": 1 / 5, "top5": 3 / 5}
    assert "1 of 5 images have no prediction and count as missed" in caplog.text


def test_accuracies_agree_with_a_plain_count_on_random_scores():
    torch.manual_seed(0)
    scores, labels = torch.rand(50, 7), torch.randint(7, (50,))
    images = [
        ({"class_scores": s}, {"image_id": f"{i}.png", "label": int(l)}) for i, (s, l) in enumerate(zip(scores, labels))
    ]
    rank = (scores > scores.gather(1, labels[:, None])).sum(1)
    assert fed(images, 50).compute() == {"top1": (rank == 0).sum() / 50, "top5": pytest.approx((rank < 5).sum() / 50)}


def test_top_5_with_fewer_than_five_classes():
    evaluator = ClassificationEvaluator(PlainDataset(annotations=["label"], classes=["a", "b"], image_ids=[1]))
    evaluator.update([{"class_scores": torch.tensor([0.4, 0.6])}], [{"image_id": 1, "label": 0}])
    assert evaluator.compute() == {"top1": 0.0, "top5": 1.0}


def test_another_number_of_classes_is_an_error():
    with pytest.raises(DataError, match="scores of 3 classes, but the dataset has 7"):
        fed([({"class_scores": torch.ones(3)}, target_of(0, "a"))], 1)


def test_results_hold_the_matrix_and_every_image(tmp_path):
    evaluator = fed(IMAGES, 4)
    evaluator.compute()
    evaluator.write_results(tmp_path / "r.json")
    assert draw_metrics(evaluator, tmp_path / "r.json") == [tmp_path / "r_confusion.png"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["top1"] == 0.25 and result["classes"] == CLASSES
    assert result["confusion_matrix"] == evaluator.confusion_matrix().tolist()
    assert result["images"][1]["image_id"] == "1.png" and result["images"][1]["class"] == "a"
    assert result["images"][1]["predicted"] == ["b", "a", "c", "d", "e"]
    assert np.asarray(Image.open(tmp_path / "r_confusion.png").convert("L")).std() > 10


@pytest.mark.parametrize("num_classes", [1, 30, 200])
def test_any_number_of_classes_can_be_drawn(tmp_path, num_classes):
    matrix = np.random.default_rng(0).integers(0, 3, (num_classes, num_classes))
    matrix[-1] = 0
    draw_confusion_matrix(matrix, [f"class {i}" for i in range(num_classes)], tmp_path / "m.png")
    assert min(Image.open(tmp_path / "m.png").size) > 300


def test_counts_can_be_read_on_every_cell(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure) or path.touch())
    draw_confusion_matrix(np.array([[99, 1], [5, 5]]), ["a", "b"], tmp_path / "m.png")
    axes = figures[0].axes[0]
    (shown,) = axes.images
    assert [text.get_text() for text in axes.texts] == ["99", "1", "5", "5"]
    for text, part in zip(axes.texts, (0.99, 0.01, 0.5, 0.5)):
        assert text.get_color() == text_color(shown.to_rgba(part))
    assert {text.get_color() for text in axes.texts} == {"black", "white"}


def evaluate_own_images(folder: Path) -> list:
    evaluator = ClassificationEvaluator(dataset_of(4))
    # Image 1 is evaluated twice, as samplers repeat images to fill a batch.
    images = IMAGES[:2] if rank() == 0 else IMAGES[1:]
    evaluator.update(*zip(*images))
    evaluator.gather()
    return [evaluator.compute(), evaluator.table()]


def test_every_image_counts_once_over_two_ranks(tmp_path):
    main, other = on_ranks(2, tmp_path, evaluate_own_images)
    assert main[0] == {"top1": 1 / 4, "top5": 3 / 4} and "4 images" in main[1]
    assert other == [{}, ""]


def test_scores_of_the_views_of_an_image_are_averaged():
    evaluator = ClassificationEvaluator(dataset_of(2))
    views = [[0.6, 0.4, 0, 0, 0, 0, 0], [0.0, 0.9, 0.1, 0, 0, 0, 0], [0.2, 0.1, 0.7, 0, 0, 0, 0]]
    predictions = [{"class_scores": torch.tensor(scores)} for scores in views]
    evaluator.update(predictions, [target_of(0, "b"), target_of(0, "b"), target_of(1, "c")])
    evaluator.update(predictions[:1], [target_of(0, "b")])  # a repeated image at the end changes nothing
    assert evaluator.compute() == {"top1": 1.0, "top5": 1.0}
    assert evaluator.stored_predictions["0.png"].scores[:2] == pytest.approx([0.65, 0.3])
