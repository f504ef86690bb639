"""A user's own dataset in the doctor, and own evaluator in vitkit test, derived from the bases alone."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import vitkit
from vitkit import DATASETS, EVALUATORS, load_config
from vitkit.tools import test as test_tool


class Boxes(vitkit.Dataset):
    """Photos in files, with a cat in each and a dog in every other one."""

    classes, category_ids, annotations, has_images = ("cat", "dog"), (3, 7), ("objects",), True

    def __init__(self, folder: str):
        self.files = sorted(Path(folder).iterdir())
        self.image_ids = range(len(self.files))

    def __len__(self):
        return len(self.files)

    def image_path(self, index):
        return self.files[index]

    def load_image(self, index):
        return cv2.imread(str(self.files[index]))[:, :, ::-1]

    def __getitem__(self, index):
        index, _ = index
        image = torch.from_numpy(self.load_image(index).transpose(2, 0, 1).copy())
        labels = torch.arange(1 + (index + 1) % 2)
        boxes = torch.tensor([0.5, 0.5, 0.25, 0.25]).repeat(len(labels), 1)
        size = tuple(image.shape[-2:])
        target = dict(labels=labels, boxes_cxcywh=boxes, image_id=index, image_size=size, original_size=size)
        return {"image": image, "target": target}

    def ground_truth(self):
        annotations = [
            dict(image_id=k, category_id=self.category_ids[label], bbox=[24, 24, 16, 16], area=256, iscrowd=0)
            for k in self.image_ids
            for label in range(1 + (k + 1) % 2)
        ]
        categories = [dict(id=3, name="cat"), dict(id=7, name="dog")]
        numbered = [annotation | dict(id=k) for k, annotation in enumerate(annotations, start=1)]
        return dict(images=[dict(id=k) for k in self.image_ids], categories=categories, annotations=numbered)


class Sounds(vitkit.Dataset):
    """Sounds with a class each, which say so without being loaded."""

    classes, annotations, image_ids, noun = ("bark", "meow"), ("label",), range(30), "sounds"

    def __len__(self):
        return len(self.image_ids)

    def __getitem__(self, index):
        raise NotImplementedError

    def image_classes(self):
        return np.arange(30), np.arange(30) % 3 // 2


class Lines(vitkit.Dataset):
    """Lines of text."""

    noun, has_vocabularies, target_vocabulary = "lines", True, None

    def __init__(self, lines: list[str]):
        self.sides = [lines]

    def use_vocabularies_of(self, other):
        self.target_vocabulary = other.target_vocabulary

    def __len__(self):
        return len(self.sides[0])

    def __getitem__(self, index):
        raise NotImplementedError


class BoxEvaluator(vitkit.Evaluator):
    """Counts predicted boxes, and has the details of detections."""

    iou, iou_types = 0.5, ("bbox",)

    def __init__(self, dataset):
        self.dataset, self.predictions = dataset, []

    def update(self, predictions, targets):
        raise NotImplementedError

    def gather(self):
        raise NotImplementedError

    def compute(self):
        return {"boxes": float(len(self.predictions))}

    def table(self):
        return f"{len(self.predictions)} boxes"

    def details(self):
        return {"cat": {"AP": 0.5, "objects": 4}}, {"small": {"AP": 0.25, "objects": self.iou}}

    def results(self):
        return self.predictions

    def load_results(self, path):
        self.predictions = json.loads(Path(path).read_text())


@pytest.fixture(autouse=True)
def own_parts(tmp_path, monkeypatch):
    """Register the classes for this test, and write photos of two splits."""
    monkeypatch.chdir(tmp_path)
    for registry in (DATASETS, EVALUATORS):
        registry.names()  # imports vitkit's own
        monkeypatch.setattr(registry, "_constructors", dict(registry._constructors))
    for dataset in (Boxes, Sounds, Lines):
        DATASETS.register(dataset)
    EVALUATORS.register(BoxEvaluator)
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 4)):
        Path(split).mkdir()
        for k in range(count):
            photo = cv2.resize(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8), (64, 64))
            cv2.imwrite(f"{split}/{k}.png", photo)


def found(train, val, check, *, where="data.train"):
    """Return the messages of the doctor's issues of one kind."""
    config = load_config("quickstart/detr", ["data.num_workers=0", "model.num_queries=5"])
    config["data"] |= dict(train=train, val=val)
    issues = vitkit.diagnose(config, skip=["overfit", "random_evaluation", "precision", "memory"], device="cpu")
    return [issue.message for issue in issues if issue.check == check and issue.where == where]


def test_the_doctor_counts_the_objects_of_an_own_dataset_and_reads_its_files():
    Path("train/5.png").write_bytes(Path("val/3.png").read_bytes())
    train, val = (dict(type="Boxes", folder=split) for split in ("train", "val"))
    assert found(train, val, "class balance") == ["2 of 2 classes occur: cat 6, dog 3"]
    assert found(train, val, "images")[0].startswith("6 images read: 64x64")
    assert "val" in "".join(found(train, val, "leakage", where="data.train, data.val"))


def test_the_doctor_takes_the_classes_that_an_own_dataset_states():
    sounds = dict(type="Sounds")
    assert found(sounds, sounds, "class balance") == ["2 of 2 classes occur: bark 20, meow 10"]


def test_the_doctor_reads_the_lines_of_an_own_dataset():
    train, val = dict(type="Lines", lines=["a b", "c", "c"]), dict(type="Lines", lines=["c"])
    assert found(train, val, "text")[0].startswith("side 1: 3 lines, 1.3 words on average, at most 2")
    assert found(train, val, "leakage", where="data.train, data.val") == ["1 of 1 val line is also in train: 1"]


def test_an_own_evaluator_of_detections_has_the_details_that_vitkit_test_prints(capsys):
    Path("config.py").write_text(
        "def config():\n"
        '    data = dict(val=dict(type="Boxes", folder="val"))\n'
        '    return dict(model=dict(type="DETR"), data=data, evaluator=dict(type="BoxEvaluator"))\n'
    )
    box = dict(image_id=1, category_id=3, bbox=[24, 24, 16, 16], score=0.9)
    Path("results.json").write_text(json.dumps([box, box | dict(image_id=3, category_id=7)]))
    details = ["--per-class", "--per-size", "--confusion", "--iou", "0.75"]
    test_tool.main(["config.py", "--eval-only", "results.json", *details])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 boxes"
    assert printed[1].split() == ["cat", "AP", "0.500", "4", "objects"]
    assert printed[2].split()[:3] == ["small", "AP", "0.250"] and "0.75" in printed[2]
    assert printed[3] == "predictions with a score of at least 0.5, IoU of at least 0.75: 1 correct"
