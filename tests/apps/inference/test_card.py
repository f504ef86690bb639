"""Model cards: what they say, that the Hub's own reader accepts them, and whose metrics they have."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import vitkit
from vitkit import DataError, load_config
from vitkit.apps.inference.card import (
    Measured,
    card_path,
    data_name,
    make_card,
    read_metrics,
    save_metrics,
    task_of,
    zoo_entry,
)
from vitkit.apps.inference.load import find_trained
from vitkit.tools import test as test_tool
from vitkit.weights import save_checkpoint


def card_of(name, **arguments):
    config, weights = find_trained(name)
    about = dict(name="cells", license=None, library="onnx", usage="Run it.", measured=read_metrics(weights))
    return ModelCard(make_card(vitkit.load(name), config, weights, **about | arguments))


def test_card_of_a_packaged_model_has_its_license_data_and_measured_metrics():
    card = card_of("shapes_dino")
    data = card.data.to_dict()
    assert (
        data["license"] == "apache-2.0" and data["datasets"] == ["shapesdetection"] and data["library_name"] == "onnx"
    )
    assert data["pipeline_tag"] == "object-detection" and data["tags"] == ["vitkit", "dino"]
    (results,) = data["model-index"]
    assert results["name"] == "cells"
    values = {metric["name"]: metric["value"] for result in results["results"] for metric in result["metrics"]}
    assert values == zoo_entry("shapes_dino")["measured"]
    assert card.text.startswith("\n# cells\n") or card.text.strip().startswith("# cells\n")
    assert "## 6 classes\n\ncircle, square" in card.text and "| ShapesDetection | val | bbox/AP | 0.78 |" in card.text


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("shapes_dino", "object-detection"),
        ("shapes_grounding", "zero-shot-object-detection"),
        ("shapes_vit", "image-classification"),
        ("shapes_mask2former", "image-segmentation"),
        ("shapes_keypoints", "keypoint-detection"),
        ("shapes_segment", "image-segmentation"),
        ("shapes_captioner", "image-to-text"),
        ("numbers_translator", "translation"),
    ],
)
def test_task_is_named_as_on_the_hub(name, task):
    assert task_of(vitkit.load(name)) == task


def test_a_license_that_the_hub_does_not_know_is_named_beside_other():
    card = card_of("shapes_vit", license="My License 2.0")
    assert (card.data.license, card.data.license_name) == ("other", "my-license-2-0")
    assert card.text.strip().endswith("My License 2.0")


def test_card_without_metrics_says_how_to_measure_them():
    card = card_of("shapes_vit", measured=[])
    assert card.data.eval_results is None and "None measured: `vitkit test`" in card.text
    card = card_of("shapes_vit", measured=[Measured("cells", "val", {}, {"AP": -1.0})])  # which could not be measured
    assert card.data.eval_results is None and "None measured: `vitkit test`" in card.text and "|" not in card.text


def test_card_replaces_no_other_readme(tmp_path):
    readme = tmp_path / "README.md"
    assert card_path(tmp_path, "cells") == readme
    readme.write_text("# cells\n\nMy project.\n")
    assert card_path(tmp_path, "cells") == tmp_path / "cells.README.md"
    readme.write_text("---\n---\n\n# cells\n\nDINO; written by vitkit 0.2.0.\n")
    assert card_path(tmp_path, "cells") == readme and card_path(tmp_path, "dogs") == tmp_path / "dogs.README.md"


def test_only_data_that_weights_were_trained_on_are_named(tmp_path):
    config, model, weights = find_trained("shapes_vit").config, vitkit.load("shapes_vit"), tmp_path / "best.pth"
    about = dict(name="cells", license=None, library="onnx", usage="Run it.", measured=[])
    save_checkpoint(weights, {"model": model.model.state_dict(), "progress": {"step": 5}})
    assert "Classifier, trained on ShapesClassification; written by vitkit" in make_card(
        model, config, weights, **about
    )
    save_checkpoint(weights, {"model": model.model.state_dict()})  # converted: the config may be a related one
    card = ModelCard(make_card(model, config, weights, **about))
    assert "datasets" not in card.data.to_dict() and "Classifier; written by vitkit" in card.text
    assert "The license of the weights is not stated." in card.text


def test_metrics_belong_to_the_weights_that_were_evaluated(tmp_path):
    weights = tmp_path / "best.pth"
    weights.write_bytes(b"first")
    assert read_metrics(weights) == []
    old = Measured("cells", "val", {}, {"bbox/AP": 0.5})
    new = Measured("cells", "val", {"tiles": 800}, {"bbox/AP": 0.6, "bbox/APs": -1.0})
    test = Measured("cells", "test", {}, {"bbox/AP": 0.4})
    for number, measured in enumerate((old, new, test)):
        path = tmp_path / ("metrics.json" if number == 0 else f"metrics-{number}.json")
        save_metrics(path, measured, weights)
        os.utime(path, (number, number))
    # A value that could not be measured is left out.
    assert read_metrics(weights) == [new._replace(metrics={"bbox/AP": 0.6}), test]
    weights.write_bytes(b"trained further")
    assert read_metrics(weights) == []
    # Files of this name that other tools have written are left alone.
    for number, text in enumerate(('{"step": 1}\n{"step": 2}', "[]", '{"AP": 0.5}')):
        (tmp_path / f"metrics-a{number}.json").write_text(text)
    (tmp_path / "metrics-a3.json").write_text("[" * 100_000)
    (tmp_path / "metrics-b.json").mkdir()
    (tmp_path / "metrics-c.json").symlink_to("nowhere")
    save_metrics(tmp_path / "metrics-5.json", old, weights)
    assert read_metrics(weights) == [old]


@pytest.mark.parametrize("key", ["metrics", "split", "data", "options"])
def test_a_damaged_file_of_metrics_is_named(tmp_path, key):
    weights, path = tmp_path / "best.pth", tmp_path / "metrics.json"
    weights.write_bytes(b"weights")
    save_metrics(path, Measured("cells", "val", {}, {}), weights)
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"metrics.json: is not a file of metrics .*Remove it, or evaluate"):
        read_metrics(weights)


def test_data_are_named_by_their_folder_and_never_by_a_path():
    assert data_name(load_config("bccd/dino_r18", ["data.root=/home/me/data/bccd"])) == "bccd"
    assert data_name({"data": {"val": {"type": "CocoDetection", "images": "/home/me/photos"}}}) == "photos"
    assert data_name(load_config("quickstart/dino")) == "ShapesDetection"
    assert data_name({}) == ""


def test_evaluation_saves_its_metrics(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    test_tool.main(["shapes_vit", "data.val.num_images=16", "data.num_workers=0", "--device", "cpu"])
    assert "metrics are in metrics.json" in capsys.readouterr().out
    saved = json.loads(Path("metrics.json").read_text())
    assert saved["data"] == "ShapesClassification" and saved["split"] == "val" and 0 <= saved["metrics"]["top1"] <= 1
