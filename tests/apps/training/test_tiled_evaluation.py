"""Evaluation in tiles, and the choice of the images that are drawn."""

import pytest
import torch

import vitkit
from vitkit import build_dataset, build_model, load_config
from vitkit.apps.inference import Tiling
from vitkit.engine.validation import choose_batches_to_draw
from vitkit.errors import ConfigError
from vitkit.weights import save_checkpoint


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A detector with random weights, and its config."""
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart/detr", ["data.val.num_images=4", "model.backbone.depth=18"])
    torch.manual_seed(0)
    classes = build_dataset(dict(type="ShapesDetection", num_images=1)).classes
    model = build_model(config["model"], classes=classes)
    save_checkpoint("best.pth", {"model": model.state_dict(), "classes": classes})
    return config


def test_evaluation_with_a_single_tile_equals_plain_evaluation(run):
    plain = vitkit.test(run, "best.pth", device="cpu")
    tiled = vitkit.test(run, "best.pth", device="cpu", tiles=64)
    assert tiled.metrics.keys() == plain.metrics.keys()
    for ours, theirs in zip(tiled.evaluator.results(), plain.evaluator.results()):
        assert ours["category_id"] == theirs["category_id"] and ours["score"] == pytest.approx(
            theirs["score"], abs=1e-5
        )
        assert ours["bbox"] == pytest.approx(theirs["bbox"], abs=1e-2)


def test_evaluation_in_tiles_covers_large_images(run):
    large = dict(data=dict(val=dict(image_size=160)))
    results = vitkit.test(run, "best.pth", device="cpu", tiles=Tiling(64, 16), **large).evaluator.results()
    assert {result["image_id"] for result in results} == {1, 2, 3, 4}
    assert max(result["bbox"][0] + result["bbox"][2] for result in results) > 130
    assert len(results) > 4 * 10  # more than the ten queries of one image


def test_tiles_are_refused_for_text(run):
    with pytest.raises(ConfigError, match=r"tiles: expected a dataset of images; data\.val is a NumberWords"):
        vitkit.test("quickstart/translation", "best.pth", device="cpu", tiles=64)


@pytest.mark.parametrize(("batches", "drawn"), [(101, [0, 14, 29, 43, 57, 71, 86, 100]), (3, [0, 1, 2]), (0, [])])
def test_drawn_images_are_spread_over_the_data(batches, drawn):
    assert choose_batches_to_draw(batches) == drawn
