"""Captioning from the command line: train, test, cache features, describe pictures."""

import json
import re
import shlex
import shutil

import cv2
import numpy as np
import pytest
import torch

from vitkit.checkpoint import read_checkpoint
from vitkit.data.synthetic.world import World
from vitkit.errors import ConfigError
from vitkit.inference import load
from vitkit.tools import caption
from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool
from vitkit.tools.data import cache_features

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
def pictures(tmp_path):
    (tmp_path / "pictures").mkdir()
    for index in range(3):
        scene = World(image_size=64 + 8 * index).scene(index)
        cv2.imwrite(str(tmp_path / f"pictures/{index}.png"), scene.image[..., ::-1])
    return "pictures"


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


def test_images_get_captions_and_attention_drawings(tiny, pictures, tmp_path, capsys):
    train(tiny, "model.attention=hard")
    capsys.readouterr()
    arguments = [tiny, "runs/tiny/last.pth", pictures, "pictures/0.png", "model.attention=hard", "--device", "cpu"]
    caption.main([*arguments, "--attention", "drawn"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == [f"pictures/{i}.png" for i in (0, 1, 2, 0)]
    assert lines[0] == lines[3]
    assert {path.name for path in (tmp_path / "drawn").iterdir()} <= {"0.png", "1.png", "2.png"}
    caption.main([tiny, "runs/tiny/last.pth", "pictures/1.png", "model.attention=hard", "--device", "cpu"])
    assert capsys.readouterr().out.splitlines() == [lines[1]]  # the same caption as in a batch
    model = load("runs/tiny/last.pth")
    assert model("pictures/1.png").text == lines[1].split("\t")[1]
    assert [prediction.name for prediction in model(pictures)] == [f"pictures/{i}.png" for i in range(3)]
    caption.main(["runs/tiny", "pictures/1.png", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("pictures/1.png\t")
    caption.main([*arguments, "--n-best", "2"])
    assert len(capsys.readouterr().out.splitlines()) == 8
    caption.main([*arguments[:2], *arguments[3:], "--beams", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_images_with_the_same_name_get_separate_drawings(tiny, pictures, tmp_path, capsys, monkeypatch):
    train(tiny)
    (tmp_path / "others").mkdir()
    shutil.copy(tmp_path / "pictures/0.png", tmp_path / "others/0.png")
    drawn = []
    monkeypatch.setattr(caption, "draw_attention", lambda *arguments: drawn.extend(arguments[-1]))
    arguments = ["pictures/0.png", "others", "pictures/0.png", "--attention", "drawn", "--device", "cpu"]
    caption.main([tiny, "runs/tiny/last.pth", *arguments])
    assert [path.name for path in drawn] == ["0.png", "0_2.png", "0.png"]


def test_images_are_resized_as_in_the_checkpoint_and_broken_ones_left_out(tiny, pictures, tmp_path, capsys):
    train(tiny)
    checkpoint = read_checkpoint("runs/tiny/last.pth")
    side = 40
    sizes = dict(least_short=side, median_short=side, most_short=side, most_long=side)
    torch.save(checkpoint | {"measured": {"image_sizes": sizes}}, "sized.pth")
    (tmp_path / "pictures/zero.png").touch()
    (tmp_path / "pictures/text.jpg").write_text("no picture")
    capsys.readouterr()
    caption.main([tiny, "sized.pth", pictures, "data.val.transforms=none", "--device", "cpu"])
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3
    assert "pictures/zero.png" in printed.err and "pictures/text.jpg" in printed.err
    assert "2 of 5 images could not be read and were left out" in printed.err
    model = load(tiny, "sized.pth", overrides=["data.val.transforms=none"])
    assert printed.out.splitlines()[0] == f"pictures/0.png\t{model('pictures/0.png').text}"
    assert model.as_evaluated(np.zeros((64, 128, 3), np.uint8)).shape == (20, 40, 3)
    (tmp_path / "pictures/zero.png").rename("zero.png")
    assert "zero.png" in fails(caption.main, tiny, "sized.pth", "zero.png")


def test_run_is_given_by_its_folder(tiny, tmp_path, capsys):
    train(tiny, "--run-dir", "images")
    capsys.readouterr()
    cache_features.main(["images", "--out", "a", "--device", "cpu"])
    cache_features.main([tiny, "images", "--out", "b", "--device", "cpu"])
    assert np.array_equal(np.load("a/val.npy"), np.load("b/val.npy"))
    train(tiny, "--init", "images", "--run-dir", "next", "optimizer.lr=1e-12")
    ours, theirs = (read_checkpoint(f"{name}/last.pth")["model"] for name in ("next", "images"))
    weights = [name for name in ours if "running" not in name and "tracked" not in name]
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in weights)
    assert "has no weights" in fails(train_tool.main, tiny, "--init", "quickstart/captioning")
    assert "Did you mean 'detr_r50'" in fails(train_tool.main, tiny, "--init", "detr_r5")


def test_training_on_cached_features_equals_training_on_images(tiny, tmp_path, capsys):
    train(tiny, "--run-dir", "images")
    cache_features.main([tiny, "images/best.pth", "--out", "maps", "--device", "cpu"])
    assert "maps/train.npy: 8 x 128 x 8 x 8" in capsys.readouterr().out
    decoding = "model.decoding=dict(max_length=5)"
    cache_features.main([tiny, "train.seed=3", decoding, "--out", "others", "--device", "cpu"])
    features = ["data.train.features=others/train.npy", "data.val.features=others/val.npy"]
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1])  # as a shell reads it
    assert printed == ["train.seed=3", decoding, *features]
    cached = ["data.train.features=maps/train.npy", "data.val.features=maps/val.npy"]
    train(tiny, "--init", "images/best.pth", "--run-dir", "b", *cached)
    train(tiny, "--init", "images/best.pth", "--run-dir", "a")
    ours, theirs = (read_checkpoint(f"{name}/last.pth")["model"] for name in "ab")
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
    assert "from a backbone with other weights" in fails(train_tool.main, tiny, "train.seed=1", *cached)


def test_errors_name_what_is_wrong(tiny, pictures, tmp_path):
    train(tiny)
    best = "runs/tiny/best.pth"
    assert "no file or folder 'none.png'" in fails(caption.main, tiny, best, "none.png")
    (tmp_path / "empty").mkdir()
    assert "folder 'empty' holds no picture" in fails(caption.main, tiny, best, "empty")
    random = "data.train.transforms=ClassificationTrainTransforms"
    assert "data.train.transforms: they draw random numbers" in fails(cache_features.main, tiny, random)
    assert "Set model.freeze_backbone=True" in fails(cache_features.main, tiny, "model.freeze_backbone=False")


def test_rare_random_flips_are_detected():
    class Mirrored:
        features = None

        def __getitem__(self, index):
            return {"image": torch.arange(3.0).flip(0) if index[1] == 5 else torch.arange(3.0)}

    with pytest.raises(ConfigError, match=r"data\.val\.transforms: they draw random numbers"):
        cache_features.check_not_random(Mirrored(), "data.val")
