"""Captioning from the command line: train, test, explain captions."""

import json
import re
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import vitkit
from vitkit.apps.explanations.explain_options import prepare_image_to_draw
from vitkit.apps.inference import load
from vitkit.config import load_config
from vitkit.data.loading.settings import DataSettings
from vitkit.data.synthetic.world import World
from vitkit.engine.build import build_model
from vitkit.engine.feature_cache import cache_features, check_not_random
from vitkit.engine.hooks import Hook
from vitkit.errors import ConfigError, DataError
from vitkit.text.vocabulary import vocabularies_of
from vitkit.tools import explain
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint

pytestmark = pytest.mark.smoke

TINY = """
def config():
    world = dict(type="ShapesCaptions", image_size=64)
    return dict(
        model=dict(
            type="ShowAttendTell", d_embedding=16, d_model=16, d_attention=16, decoding=dict(max_length=6),
            backbone=dict(type="resnet18", pretrained=False, out_features=["res3"]),
        ),
        criterion=dict(type="CaptionLoss"),
        data=dict(
            train=dict(**world, num_images=8), val=dict(**world, num_images=5, split="val"),
            images_per_gpu=4, val_images_per_gpu=2, num_workers=0,
        ),
        optimizer=dict(type="AdamW", lr=1e-3),
        schedule=dict(type="CosineLR"),
        evaluator=dict(type="CaptionEvaluator"),
        train=dict(epochs=1, log_every=1, best_metric="CIDEr-D"),
    )
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A config file that trains in seconds; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    return "tiny.py"


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images").mkdir()
    for index in range(3):
        scene = World(image_size=64 + 8 * index).scene(index)
        cv2.imwrite(str(tmp_path / f"images/{index}.png"), scene.image[..., ::-1])
    return "images"


def train(*args):
    train_tool.main([*map(str, args), "--device", "cpu"])


def fails(main, *args) -> str:
    with pytest.raises(SystemExit) as error:
        main([*map(str, args), "--device", "cpu"])
    return str(error.value.code)


def test_captioner_is_trained_tested_and_scored_again(tiny, tmp_path, capsys):
    train(tiny)
    run = tmp_path / "runs/tiny"
    assert (run / "predictions.png").is_file()
    assert read_checkpoint(run / "best.pth")["vocabularies"].keys() == {"target"}
    capsys.readouterr()
    test_tool.main([tiny, str(run / "best.pth"), "--device", "cpu"])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert [entry["image_id"] for entry in results] == [1, 2, 3, 4, 5]
    test_tool.main([tiny, "--eval-only", "results.json", "--device", "cpu"])
    (score,) = re.findall(r"CIDEr-D +([\d.]+)", capsys.readouterr().out)
    assert re.findall(r"CIDEr-D +([\d.]+)", printed) == [score]


def test_images_get_captions_and_figures_of_attention(tiny, images, tmp_path, capsys):
    train(tiny, "model.attention=hard")
    model = load("runs/tiny/last.pth")
    predictions = model(images)
    assert [prediction.name for prediction in predictions] == [f"images/{i}.png" for i in range(3)]
    assert model("images/1.png").text == predictions[1].text
    capsys.readouterr()
    arguments = [tiny, "runs/tiny/last.pth", "model.attention=hard", "--image", "images/1.png", "--device", "cpu"]
    explain.main([*arguments, "--out", "drawn", "--beams", "2"])
    printed = capsys.readouterr().out
    assert "wrote drawn/1_beams.png" in printed and (tmp_path / "drawn/1_next_tokens.png").is_file()
    if predictions[1].text:
        assert "wrote drawn/1_words.png" in printed
    else:
        assert "no figure of the words: the caption is empty" in printed


def test_images_are_resized_as_in_the_checkpoint_and_broken_ones_left_out(tiny, images, tmp_path, capsys):
    train(tiny)
    checkpoint = read_checkpoint("runs/tiny/last.pth")
    side = 40
    sizes = dict(least_short=side, median_short=side, most_short=side, most_long=side)
    torch.save(checkpoint | {"measured": {"image_sizes": sizes}}, "sized.pth")
    (tmp_path / "images/zero.png").touch()
    (tmp_path / "images/text.jpg").write_text("no image")
    capsys.readouterr()
    model = load(tiny, "sized.pth", overrides=["data.val.transforms=none"])
    assert len(model(images)) == 3
    assert model.as_evaluated(np.zeros((64, 128, 3), np.uint8)).shape == (20, 40, 3)
    shown = prepare_image_to_draw(model, model.to_array("images/2.png"))
    assert shown.shape == (40, 40, 3)  # which figures of attention are drawn on


def test_run_is_given_by_its_folder(tiny, tmp_path, capsys):
    train(tiny, "--run-dir", "images")
    train(tiny, "--init", "images", "--run-dir", "next", "optimizer.lr=1e-12")
    ours, theirs = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("next", "images"))
    weights = [name for name in ours if "running" not in name and "tracked" not in name]
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in weights)
    assert "has no weights" in fails(train_tool.main, tiny, "--init", "quickstart/captioning")
    assert "Did you mean 'detr_r50'" in fails(train_tool.main, tiny, "--init", "detr_r5")


def test_training_on_cached_features_equals_training_on_images(tiny, tmp_path, capsys):
    train(tiny, "--run-dir", "images")
    steps = ["--init", "images/best.pth", "model.dropout=0.5", "train.epochs=2"]
    cached = "data.cache_features=maps"
    train(tiny, *steps, "--run-dir", "a")
    capsys.readouterr()
    train(tiny, *steps, "--run-dir", "b", cached)
    assert "maps/train.npy: 8 x 128 x 8 x 8" in capsys.readouterr().out
    written = (tmp_path / "maps/train.npy").stat().st_mtime_ns
    train(tiny, *steps, "--run-dir", "c", cached)
    assert (tmp_path / "maps/train.npy").stat().st_mtime_ns == written  # used again
    for run in "bc":
        ours, theirs = (read_checkpoint(f"{name}/last.pth")["model"] for name in (run, "a"))
        for name, value in ours.items():
            assert value.equal(theirs[name]), name
    data = load_config("b/config.json")["data"]
    assert data["val"]["features"] == str(tmp_path / "maps/val.npy")
    # Other weights compute other features.
    train(tiny, "--run-dir", "d", "train.seed=1", cached)
    assert (tmp_path / "maps/train.npy").stat().st_mtime_ns > written
    assert "from a backbone with other weights" in fails(train_tool.main, "b/config.json", "--init", "images/best.pth")


def test_one_of_several_ranks_caches_the_features_of_all_images(tiny, tmp_path, monkeypatch):
    # The loaders of the other ranks would have the other images.
    monkeypatch.setattr("vitkit.data.loading.settings.current_world_size", lambda: 2)
    config = load_config(tiny)
    data = DataSettings(**config["data"], cache_features="maps")
    train_set = data.dataset("train")
    model = build_model(config["model"], vocabularies=vocabularies_of(train_set))
    cache_features(model, {"train": train_set}, data, torch.device("cpu"))
    assert train_set.features.array.shape == (8, 128, 8, 8)


def test_only_the_main_rank_writes_results(tiny, monkeypatch):
    train(tiny)
    monkeypatch.setattr("vitkit.distributed.rank", lambda: 1)
    metrics = vitkit.test("runs/tiny", out="results.json", device="cpu").metrics
    assert "nll" in metrics and not Path("results.json").exists()


def test_a_run_on_cached_features_is_resumed(tiny, tmp_path):
    class Stops(Hook):
        def after_step(self, run, *args, **kwargs):
            signal.raise_signal(signal.SIGTERM)

    settings = {"data.cache_features": "maps", "device": "cpu"}
    vitkit.train(tiny, run_dir="whole", **settings)
    with pytest.raises(SystemExit):
        vitkit.train(tiny, run_dir="cut", hooks=[Stops()], **settings)
    (tmp_path / "maps/val.json").unlink()
    with pytest.raises(DataError, match=r"features: no file .*val.npy.*data\.cache_features"):
        vitkit.train(resume="cut", device="cpu")
    vitkit.train(tiny, run_dir="again", **settings)
    vitkit.train(resume="cut", device="cpu")
    whole, cut = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("whole", "cut"))
    assert all(value.equal(cut[name]) for name, value in whole.items())


def test_errors_name_what_is_wrong(tiny, images, tmp_path):
    train(tiny)
    assert "points, queries: not for" in fails(
        explain.main, "runs/tiny", "--image", "images/0.png", "--points", "1,1", "--queries", "0"
    )
    random = "data.train.transforms=ClassificationTrainTransforms"
    cached = "data.cache_features=maps"
    assert "data.train.transforms: they draw random numbers" in fails(train_tool.main, tiny, cached, random)
    assert "Set model.freeze_backbone=True" in fails(train_tool.main, tiny, cached, "model.freeze_backbone=False")
    assert "DETR is neither a captioner" in fails(train_tool.main, "quickstart/detr", cached)


def test_rare_random_flips_are_detected():
    class Mirrored:
        def __getitem__(self, index):
            return {"image": torch.arange(3.0).flip(0) if index[1] == 5 else torch.arange(3.0)}

    with pytest.raises(ConfigError, match=r"data\.val\.transforms: they draw random numbers"):
        check_not_random(Mirrored(), "data.val")
