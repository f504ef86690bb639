"""A resumed run compares its data with its own record: classes go by name, whatever lists them, and none may be new."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitkit
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_datasets
from vitkit.errors import ConfigError, DataError
from vitkit.weights import read_checkpoint
from vitkit.weights.locate import Located

MODEL = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    files = dict(type="CocoDetection", images="images", annotations="boxes.json")
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 16
    cfg["model"]["head"].update(d_model=16, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    cfg["data"] = dict(train=files, val=files, images_per_gpu=2, num_workers=0)
    cfg["schedule"] = dict(type="MultiStepLR", drop_at_epochs=[100])
    cfg["train"] = dict(epochs=1, log_every=100)
    return cfg
"""
COLORS = {"disc": (250, 40, 40), "bar": (40, 40, 250), "ring": (40, 250, 40)}


def draw(path, color=(120, 120, 120), size=(32, 32)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def coco(path, categories):
    """Four images with a disc and a bar; `categories` are ids by name."""
    boxes = {"disc": [2, 2, 12, 12], "bar": [16, 18, 14, 6], "ring": [18, 2, 10, 10]}
    for k in range(4):
        draw(path.parent / "images" / f"{k}.png", (60 * k, 30, 90))
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": 32, "height": 32} for k in range(4)],
        "annotations": [
            {"id": 10 * k + i, "image_id": k, "category_id": i, "bbox": boxes.get(name, boxes["disc"])}
            for k in range(4)
            for name, i in sorted(categories.items())
        ],
        "categories": [{"id": i, "name": name} for name, i in categories.items()],
    }
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("vitkit")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    Path("tiny.py").write_text(MODEL)
    return tmp_path


def test_run_goes_on_with_its_classes_by_name_if_the_file_has_them_in_another_order(folder):
    coco(folder / "boxes.json", {"disc": 1, "bar": 2})
    vitkit.train("tiny.py", run_dir="same", device="cpu")
    vitkit.train("tiny.py", run_dir="reordered", device="cpu")
    vitkit.train(resume="same", device="cpu", **{"train.epochs": 2})
    coco(folder / "boxes.json", {"bar": 1, "disc": 2})  # exported again, in place
    vitkit.train(resume="reordered", device="cpu", **{"train.epochs": 2})
    same, reordered = (read_checkpoint(f"{run}/last.pth") for run in ("same", "reordered"))
    assert all(value.equal(reordered["model"][name]) for name, value in same["model"].items())
    assert reordered["classes"] == ["disc", "bar"] and reordered["category_ids"] == [1, 2]
    metrics = [
        json.loads(Path(run, "log.jsonl").read_text().splitlines()[-1])["metrics"] for run in ("same", "reordered")
    ]
    assert metrics[0] == metrics[1]


def test_run_is_not_resumed_with_a_class_that_is_new_or_gone(folder):
    coco(folder / "boxes.json", {"disc": 1, "bar": 2})
    vitkit.train("tiny.py", run_dir="run", device="cpu")
    before = Path("run/last.pth").read_bytes(), Path("run/config.json").read_text()
    for categories, change in (
        ({"disc": 1, "bar": 2, "ring": 3}, "has 'ring' in addition"),
        ({"disc": 1}, "lacks 'bar'"),
        ({"disc": 1, "rod": 2}, "lacks 'bar' and has 'rod' in addition"),
    ):
        coco(folder / "other.json", categories)
        with pytest.raises(DataError, match=f"classes disc, bar; data.train {change}.*--init run.last.pth"):
            vitkit.train(resume="run", device="cpu", **{"data.train.annotations": "other.json"})
    with pytest.raises(DataError, match="lacks 'bar'.*--init"):
        vitkit.train(resume="run", device="cpu", data=dict(classes=["disc"]))
    assert before == (Path("run/last.pth").read_bytes(), Path("run/config.json").read_text())


def recorded(**values):
    return Located("checkpoint", "run/last.pth", _metadata=values)


def resumed(spec, classes, **record):
    """The training data of a run that is resumed after it was trained on these classes."""
    train, val = build_datasets(DataSettings(train=spec, val=spec), recorded(classes=classes, **record))
    assert val.classes == train.classes
    return train


def yolo(folder, names):
    for name in ("disc", "bar"):
        draw(folder / "images" / f"{name}.png")
        labels = folder / "labels" / f"{name}.txt"
        labels.parent.mkdir(exist_ok=True)
        labels.write_text(f"{names.index(name)} 0.5 0.5 0.25 0.25\n")
    (folder / "data.yaml").write_text(f"train: images\nval: images\nnames: {json.dumps(names)}\n")
    return {"type": "CocoDetection", "images": None, "annotations": str(folder)}


def csv(folder, names):
    for name in names:
        draw(folder / f"{name}.png")
    rows = "".join(f"{name}.png,{name},2,2,12,12\n" for name in names)
    (folder / "boxes.csv").write_text(f"file,class,xmin,ymin,xmax,ymax\n{rows}")
    return {"type": "CocoDetection", "images": str(folder), "annotations": str(folder / "boxes.csv")}


def voc(folder, names):
    box = "<bndbox><xmin>3</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    for name in names:
        draw(folder / f"{name}.png")
        (folder / f"{name}.xml").write_text(f"<annotation><object><name>{name}</name>{box}</object></annotation>")
    return {"type": "CocoDetection", "images": str(folder), "annotations": str(folder)}


def image_folder(folder, names):
    for name in names:
        draw(folder / name / f"{name}.png")
    return {"type": "ImageFolder", "folder": str(folder)}


def semantic(folder, names):
    """An image with the left half of the class disc and the right half of the class bar."""
    draw(folder / "images" / "0.png")
    (folder / "maps").mkdir(exist_ok=True)
    labels = np.repeat([[names.index("disc")] * 16 + [names.index("bar")] * 16], 32, axis=0)
    Image.fromarray(labels.astype(np.uint8)).save(folder / "maps" / "0.png")
    maps = {"images": str(folder / "images"), "labels": str(folder / "maps"), "image_suffix": ".png"}
    return {"type": "SemanticFolder", **maps, "classes": list(names)}


def panoptic(folder, names, things=("disc",), task="panoptic"):
    """The same image; segments 1 and 2 are disc and bar."""
    draw(folder / "images" / "0.png")
    (folder / "maps").mkdir(exist_ok=True)
    ids = np.zeros((32, 32, 3), np.uint8)
    ids[:, :16, 0], ids[:, 16:, 0] = 1, 2
    Image.fromarray(ids).save(folder / "maps" / "0.png")
    segments = [
        {"id": k, "category_id": names.index(name), "area": 512, "bbox": [16 * (k - 1), 0, 16, 32], "iscrowd": 0}
        for k, name in ((1, "disc"), (2, "bar"))
    ]
    content = {
        "images": [{"id": 1, "file_name": "0.png", "width": 32, "height": 32}],
        "annotations": [{"image_id": 1, "file_name": "0.png", "segments_info": segments}],
        "categories": [{"id": k, "name": name, "isthing": int(name in things)} for k, name in enumerate(names)],
    }
    (folder / "panoptic.json").write_text(json.dumps(content))
    files = {"images": str(folder / "images"), "maps": str(folder / "maps")}
    return {"type": "CocoPanoptic", **files, "annotations": str(folder / "panoptic.json"), "task": task}


@pytest.mark.parametrize("write", [yolo, semantic, panoptic], ids=lambda write: write.__name__)
def test_classes_in_another_order_go_by_name(tmp_path, write):
    data = resumed(write(tmp_path, ["bar", "disc"]), ["disc", "bar"])
    assert data.classes == ["disc", "bar"]
    of_images = {Path(data.image_path(k)).stem: data[k]["target"]["labels"].tolist() for k in range(len(data))}
    assert of_images == ({"disc": [0], "bar": [1]} if write is yolo else {"0": [0, 1]})


def test_segments_in_another_order_keep_their_pixels_kinds_and_ids(tmp_path):
    record = {"things": [True, False], "category_ids": [0, 1]}
    data = resumed(panoptic(tmp_path, ["bar", "disc"]), ["disc", "bar"], **record)
    assert data.things == [True, False] and data.category_ids == [0, 1]
    ids, segments = data.load_panoptic(0)
    assert [(segment["id"], segment["label"]) for segment in segments] == [(1, 0), (2, 1)] and ids[0, 0] == 1
    assert (data.load_semantic(0)[0, [0, 31]] == [0, 1]).all()
    (only,) = data.ground_truth()["annotations"]  # of the thing
    assert only["category_id"] == 0 and only["bbox"] == [0, 0, 16, 32]


def test_class_of_another_kind_is_an_error(tmp_path):
    for things, change in ((["disc", "bar"], "'bar' as things, not stuff"), ([], "'disc' as stuff, not things")):
        spec = panoptic(tmp_path, ["disc", "bar"], things)
        with pytest.raises(DataError, match=f"data.train has {change}.*--init run.last.pth"):
            resumed(spec, ["disc", "bar"], things=[True, False])


def test_kinds_and_classes_of_val_are_those_of_train(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    train = panoptic(tmp_path / "train", ["disc", "bar", "ring"], ["disc", "ring"])
    val = panoptic(tmp_path / "val", ["bar", "disc"])
    _, data = build_datasets(DataSettings(train=train, val=val))
    assert (data.classes, data.things) == (["disc", "bar", "ring"], [True, False, True])
    assert [segment["label"] for segment in data.load_panoptic(0).segments_info] == [0, 1]
    val = panoptic(tmp_path / "val", ["bar", "disc"], ["bar", "disc"])
    with pytest.raises(DataError, match="data.val has 'bar' as things, not stuff as in data.train. Correct `isthing`"):
        build_datasets(DataSettings(train=train, val=val))


@pytest.mark.parametrize("write", [csv, voc, image_folder, yolo, semantic, panoptic], ids=lambda write: write.__name__)
def test_renamed_class_is_an_error_for_every_dataset(tmp_path, write):
    spec = write(tmp_path, ["bar", "disc"])
    assert resumed(spec, ["bar", "disc"]).classes == ["bar", "disc"]
    with pytest.raises(DataError, match="run.last.pth: .*data.train lacks 'ball' and has 'bar' in addition.*--init"):
        resumed(spec, ["ball", "disc"])


def test_order_of_classes_does_not_matter_to_prompts(tmp_path):
    for name in ("bar", "disc"):
        (tmp_path / name).mkdir()
    parts = [csv(tmp_path / name, [name]) for name in ("bar", "disc")]
    data = DataSettings(train=(spec := {"type": "MixedDataset", "datasets": parts}), val=spec, prompts={})
    train, _ = build_datasets(data, recorded(classes=["disc", "bar"]))
    assert train.classes == ["bar", "disc"]
    with pytest.raises(DataError, match="lacks 'ring'"):
        build_datasets(data, recorded(classes=["disc", "bar", "ring"]))


def test_labels_of_own_datasets_without_names_to_follow_keep_their_order(tmp_path):
    spec = {"type": "ShapesDetection", "num_images": 2, "image_size": 32, "pairs": ["red star", "blue star"]}
    assert resumed(spec, ["red star", "blue star"]).num_objects is None
    with pytest.raises(DataError, match="data.train has them in another order.*--init"):
        resumed(spec, ["blue star", "red star"])


def test_vocabulary_of_a_resumed_run_is_its_own(folder):
    text = dict(type="NumberWords", num_pairs=8)
    overrides = {"data.train": text | {"vocabulary": {"kind": "word"}}, "data.val": text, "train.epochs": 1}
    vitkit.train("quickstart/translation", run_dir="run", device="cpu", **overrides)
    with pytest.raises(ConfigError, match="data.train.vocabulary.kind cannot change when a run is resumed"):
        vitkit.train(resume="run", device="cpu", **{"data.train.vocabulary.kind": "char"})
