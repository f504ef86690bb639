"""Classification from the command lines to the files that the tools write."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.real_runs import finish, start
from PIL import Image

from vitkit.tools import test as test_tool
from vitkit.tools import train as train_tool
from vitkit.weights import read_checkpoint

CONFIG = """
from vitkit.configs.parts.imagenet import deit_augmentation, imagenet


def config():
    data = imagenet(deit_augmentation(), images_per_gpu=4, size=32, root="photos")
    data |= dict(num_workers=0, val_images_per_gpu=2)
    return dict(
        model=dict(type="Classifier", backbone=dict(type="resnet18", pretrained=False)),
        criterion=dict(type="ClassificationLoss", label_smoothing=0.1),
        data=data,
        optimizer=dict(type="AdamW", lr=1e-3, weight_decay=0.05, no_weight_decay=["vectors"], layer_decay=0.8),
        schedule=dict(type="CosineLR", warmup_epochs=0.5, end_factor=0.01),
        evaluator=dict(type="ClassificationEvaluator"),
        train=dict(epochs=2, log_every=1, best_metric="top1"),
    )
"""


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A config file beside a folder of 3 classes: 8 images to train with, 5 to evaluate."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for split, counts in (("train", (3, 2, 3)), ("val", (2, 1, 2))):
        for name, count in zip(("cat", "cow", "dog"), counts):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 255, (36 + i, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg")
    (tmp_path / "photos.py").write_text(CONFIG)
    return str(tmp_path / "photos.py")


def train(*args):
    train_tool.main([*map(str, args), "--device", "cpu"])


def fails(main, *args) -> str:
    with pytest.raises(SystemExit) as error:
        main([*map(str, args), "--device", "cpu"])
    return str(error.value.code)


def weights(path) -> dict:
    return read_checkpoint(path)["model"]


def test_run_on_folders_writes_its_files_and_testing_repeats_its_metrics(photos, capsys):
    train(photos, "--run-dir", "run")
    printed = capsys.readouterr().out
    assert "8 training and 5 validation images, 3 classes" in printed
    assert {"best.pth", "last.pth", "curves.png", "predictions.png"} <= {p.name for p in Path("run").iterdir()}
    assert np.asarray(Image.open("run/predictions.png").convert("L")).std() > 10
    saved = read_checkpoint("run/last.pth")
    assert saved["classes"] == saved["category_ids"] == ["cat", "cow", "dog"]
    test_tool.main([photos, "run/last.pth", "--per-class", "--out", "out.json", "--device", "cpu"])
    tested = capsys.readouterr().out
    line = next(line for line in reversed(printed.splitlines()) if line.startswith("top-1"))
    assert line in tested and "results are in out.json, out_confusion.png" in tested
    assert all(f"  {name:<20} accuracy " in tested for name in ("cat", "cow", "dog"))
    result = json.loads(Path("out.json").read_text())
    assert np.sum(result["confusion_matrix"], axis=1).tolist() == [2, 1, 2] and len(result["images"]) == 5


def test_resumed_run_equals_an_uninterrupted_one(photos):
    """Erasing and mixing sample from generators whose state is in checkpoints."""
    constant = ["schedule=MultiStepLR", "schedule.drop_at_epochs=[100]"]
    train(photos, "--run-dir", "whole", "train.epochs=2", *constant)
    train(photos, "--run-dir", "parts", "train.epochs=1", *constant)
    train("--resume", "parts", "train.epochs=2")
    whole, parts = weights("whole/last.pth"), weights("parts/last.pth")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_other_classes_are_an_error_but_start_anew_with_init(photos, capsys):
    train(photos, "--run-dir", "run", "train.epochs=1")
    for split in ("train", "val"):
        Path(f"photos/{split}/dog").rename(f"photos/{split}/horse")
    message = fails(test_tool.main, photos, "run/last.pth")
    assert "not trained on 1 class of the model, horse (checkpoint: 3 classes cat, cow, dog)" in message
    train(photos, "--run-dir", "own", "--init", "run/last.pth", "train.epochs=1", "optimizer.lr=1e-9")
    before, after = weights("run/last.pth"), weights("own/last.pth")
    torch.testing.assert_close(before["backbone.conv1.weight"], after["backbone.conv1.weight"], rtol=0, atol=1e-6)
    moved = (before["backbone.fc.weight"] - after["backbone.fc.weight"]).abs().amax(1)
    assert moved[:2].max() < 1e-6 and moved[2] > 1e-3
    assert "kept        2  cat, cow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda: Path("photos/val").rename("photos/valid"), "data.val: no folder 'photos/val'"),
        (lambda: Path("photos/val/dog").rename("photos/val/dogs"), "they differ at id dog: 'dog' and None"),
        (lambda: Path("photos/val/cow/0.jpg").write_bytes(b"\xff\xd8nothing"), "cannot decode 'photos/val/cow/0.jpg'"),
    ],
)
def test_wrong_folders_are_errors_that_name_them(photos, change, expected):
    change()
    message = fails(train_tool.main, photos, "train.epochs=1")
    assert expected in message.replace(f"{Path.cwd()}/", "")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.images_per_gpu=3", "expected an even number"),
        ("data.train.transforms.mixups=1.0", "mixups: unknown key 'mixups'. Did you mean 'mixup'"),
        ("data.train.transforms.rand_augment=m9", "rand_augment='m9'"),
        ("model.num_classes=5", "model.num_classes=5, but the dataset has 3 classes"),
        ("data.train.transforms=DETRTrainTransforms", "classifier needs images of one size"),
    ],
)
def test_wrong_settings_are_helpful_errors(photos, override, expected):
    assert expected in fails(train_tool.main, photos, override)


def test_testing_on_two_ranks_gives_the_metrics_of_one(photos, capsys):
    def on_two_ranks(tool, *args):
        assert finish(start(*args, ranks=2, tool=tool)) == [0, 0], Path("output.txt").read_text()[-3000:]

    on_two_ranks("train", photos, "--run-dir", "run", "train.epochs=1")
    on_two_ranks("test", photos, "run/last.pth", "--out", "two.json")
    test_tool.main([photos, "run/last.pth", "--out", "one.json", "--device", "cpu"])
    one, two = (json.loads(Path(name).read_text()) for name in ("one.json", "two.json"))
    images = [sorted(result.pop("images"), key=lambda image: image["image_id"]) for result in (one, two)]
    assert one == two and [i["predicted"] for i in images[0]] == [i["predicted"] for i in images[1]]
