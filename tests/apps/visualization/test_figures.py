import json

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.apps.visualization import curves
from vitkit.apps.visualization import predictions as predictions_module
from vitkit.apps.visualization.boxes import draw_detections
from vitkit.apps.visualization.canvas import class_color, enlarge, save_grid
from vitkit.apps.visualization.curves import plot_training, read_log, smooth
from vitkit.apps.visualization.predictions import save_pairs
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.errors import DataError
from vitkit.structures import ScoreThresholds

NAMES = ["cat", "dog"]


def has_color(image: np.ndarray, color: tuple[int, int, int]) -> bool:
    return bool((image == color).all(axis=-1).any())


def test_boxes_are_drawn_at_their_location_in_their_class_color():
    image = np.zeros((400, 500, 3), np.uint8)
    drawn = draw_detections(image, [[100, 120, 200, 240]], [1], NAMES, scores=[0.9])
    assert drawn.shape == image.shape
    assert tuple(drawn[180, 100]) == class_color(1)
    assert tuple(drawn[240, 150]) == class_color(1)
    assert not drawn[180, 110:190].any()
    assert not image.any()


def test_a_small_image_is_enlarged_with_its_boxes():
    image = torch.zeros(3, 40, 50, dtype=torch.uint8)
    drawn = draw_detections(image, torch.tensor([[10.0, 20.0, 30.0, 35.0]]), torch.tensor([0]), NAMES, min_side=320)
    assert drawn.shape == (320, 400, 3)
    assert tuple(drawn[220, 80]) == class_color(0)


def test_very_long_image_is_not_enlarged_to_gigabytes():
    drawn, factor = enlarge(np.zeros((1, 3000, 3), np.uint8))
    assert (drawn.size, factor) == ((3000, 1), 1)


def test_image_without_boxes_is_unchanged():
    image = np.full((400, 400, 3), 7, np.uint8)
    drawn = draw_detections(image, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), NAMES, torch.zeros(0))
    assert np.array_equal(drawn, image)


def test_a_float_image_is_refused():
    with pytest.raises(ValueError, match="expected uint8"):
        draw_detections(np.zeros((4, 4, 3)), [], [], NAMES)


def test_neighboring_classes_have_distinct_colors():
    colors = np.array([class_color(label) for label in range(24)], float)
    distances = np.linalg.norm(colors[:, None] - colors[None], axis=2) + 1e3 * np.eye(24)
    assert distances.min() > 20
    assert np.diagonal(distances, offset=1).min() > 100


def test_sheet_shows_predictions_above_the_threshold_beside_the_truth(tmp_path):
    dataset = ShapesDetection(3, image_size=64, min_objects=0, max_objects=0)
    target = dataset[0]["target"]
    predictions = {
        "scores": torch.tensor([0.9, 0.2]),
        "labels": torch.tensor([0, 1]),
        "boxes_xyxy": torch.tensor([[10.0, 20.0, 40.0, 60.0], [5.0, 5.0, 50.0, 50.0]]),
    }
    path = tmp_path / "new" / "sheet.png"
    rows = [(dataset.load_image(i), predictions, target) for i in range(3)]
    save_pairs(rows, dataset.classes, "boxes_xyxy", path)
    sheet = np.asarray(Image.open(path))
    left, right = np.array_split(sheet[:, : sheet.shape[1] // 2], 2, axis=1)
    assert has_color(left, class_color(0))
    assert not has_color(left, class_color(1))
    assert not has_color(right, class_color(0))


def test_a_weak_models_heap_of_boxes_is_reduced_to_its_best(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(predictions_module, "save_grid", lambda images, titles, *_, **__: drawn.append(titles))
    monkeypatch.setattr(
        predictions_module, "draw_prediction", lambda image, objects, *_, **__: drawn.append(objects) or image
    )
    dataset = ShapesDetection(1, image_size=64, min_objects=4, max_objects=4)
    scores = torch.linspace(0.05, 0.25, 100).flip(0).roll(50)
    heap = {"scores": scores, "labels": torch.arange(100) % 2, "boxes_xyxy": torch.rand(100, 4) * 60}
    by_class = ScoreThresholds(0.1, (0.1, 0.2))
    save_pairs(
        [(dataset.load_image(0), heap, dataset[0]["target"])], dataset.classes, "boxes_xyxy", "", thresholds=by_class
    )
    shown, titles = drawn
    assert len(shown["scores"]) == 9 == len(shown["boxes_xyxy"])  # five more than the true ones
    above = scores >= by_class.of(heap["labels"])
    assert shown["scores"].tolist() == scores[above].sort(descending=True).values[:9].tolist()
    lowest = float(shown["scores"].min())
    assert titles == [f"prediction (best 9 of {int(above.sum())}, from {lowest:.2f})", "ground truth"]


def train_line(step: int, loss: float = 1.0) -> str:
    losses = {"labels": 0.5, "aux0_labels": 0.5}
    return json.dumps({"kind": "train", "step": step, "epoch": step / 10, "loss": loss, "losses": losses})


def val_line(step: int) -> str:
    metrics = {"bbox/AP": 0.3, "bbox/AP50": 0.6, "bbox/APs": -1.0, "loss": 2.0}
    return json.dumps({"kind": "val", "step": step, "epoch": step / 10, "metrics": metrics})


@pytest.mark.parametrize(
    "lines",
    [
        [train_line(0)],
        [val_line(10)],
        [*map(train_line, range(100)), val_line(50), val_line(100)],
        [train_line(0, float("nan")), train_line(1)],
    ],
    ids=["one point", "validation only", "both", "nan loss"],
)
def test_curves_are_drawn_from_the_available_records(tmp_path, lines):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines) + "\n")
    plot_training(log, tmp_path / "out" / "curves.png")
    drawn = np.asarray(Image.open(tmp_path / "out" / "curves.png").convert("RGB"))
    assert (drawn != 255).any()


@pytest.mark.parametrize(
    "losses, expected",
    [
        ({"labels": 1.0, "l1": 0.5, "aux0_labels": 9.0}, [["total"], ["labels", "l1"]]),
        ({"labels": 3.0}, [["total"]]),  # the total once more
    ],
)
def test_terms_of_the_loss_are_not_flat_below_the_total(losses, expected, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("vitkit.apps.visualization.curves.save_figure", lambda figure, *a, **k: figures.append(figure))
    record = {"kind": "train", "step": 1, "epoch": 1, "loss": sum(losses.values()), "losses": losses}
    (tmp_path / "log.jsonl").write_text(json.dumps(record))
    plot_training(tmp_path / "log.jsonl", tmp_path / "curves.png")
    (figure,) = figures
    assert [[line.get_label() for line in axes.get_lines()] for axes in figure.axes] == expected


def test_incomplete_line_is_skipped_and_a_repeated_step_counts_once(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([train_line(0), train_line(1, 5.0), '{"kind": "tra', train_line(1, 4.0), '{"kind"']))
    train, val = read_log(log)
    assert [record["loss"] for record in train] == [1.0, 4.0]
    assert val == []


def test_a_missing_or_empty_log_is_named(tmp_path):
    with pytest.raises(DataError, match="no log"):
        plot_training(tmp_path / "none.jsonl", tmp_path / "curves.png")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no train or val record"):
        plot_training(tmp_path / "empty.jsonl", tmp_path / "curves.png")


def test_smoothing_keeps_a_constant_and_averages_inside():
    assert smooth(np.full(9, 3.0), 5) == pytest.approx(np.full(9, 3.0))
    assert smooth(np.array([0.0, 0.0, 3.0, 0.0, 0.0]), 3) == pytest.approx([0, 1, 1, 1, 0])


def test_titles_are_wrapped_and_never_truncated(tmp_path):
    drawn = np.zeros((100, 200, 3), np.uint8)
    save_grid([drawn], ["short"], tmp_path / "a.png", panel=200)
    save_grid([drawn], ["several words that do not fit one line " * 2 + "x" * 80], tmp_path / "b.png", panel=200)
    short, long = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert long.shape[0] >= short.shape[0] + 3 * 12 and long.shape[1] == short.shape[1]
    assert (long[:, -8:] == 255).all()


def test_legends_stand_beside_the_curves(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(curves, "save_figure", lambda figure, path, dpi: figures.append(figure))
    lines = [{"kind": "val", "step": k, "epoch": k, "metrics": {"mIoU": 0.1 * k, "PQ": 0.2}} for k in range(1, 4)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot_training(tmp_path / "log.jsonl", tmp_path / "curves.png")
    figures[0].draw_without_rendering()
    for axes in figures[0].axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.x0 >= axes.get_window_extent().x1 and legend.x1 <= figures[0].bbox.x1
