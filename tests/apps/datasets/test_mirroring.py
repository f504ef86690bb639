"""Texts that say left or right are found where transforms flip images, and nowhere else."""

import json
import logging
from pathlib import Path

import pytest
from PIL import Image

import vitkit
from vitkit.apps.datasets.mirroring import find_mirrored_texts, has_unpaired_points, sided_names
from vitkit.apps.doctor import diagnose
from vitkit.data.loading.settings import DataSettings

FLIPS = {"type": "DETRTrainTransforms", "scales": [64], "max_size": 64, "crop_probability": 0.0}
TEXTS = ["the leftmost block", "a right-hand block"]


def draw(folder: Path, count: int = 2) -> None:
    folder.mkdir()
    for k in range(count):
        Image.new("RGB", (64, 64), (20 * k, 90, 30)).save(folder / f"{k}.png")


def regions(folder: Path, texts: list[str]) -> dict:
    """A file of referring expressions, a text for each image."""
    draw(folder / "images", len(texts))
    lines = [
        {
            "filename": f"{k}.png",
            "height": 64,
            "width": 64,
            "grounding": {
                "caption": text,
                "regions": [{"bbox": [4, 4, 30, 30], "phrase": text, "tokens_positive": [[0, len(text)]]}],
            },
        }
        for k, text in enumerate(texts)
    ]
    (folder / "refer.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {"type": "GroundingDataset", "images": str(folder / "images"), "annotations": str(folder / "refer.jsonl")}


def captions(folder: Path, texts: list[str]) -> dict:
    draw(folder / "images", len(texts))
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": 64, "height": 64} for k in range(len(texts))],
        "annotations": [{"id": k, "image_id": k, "caption": text} for k, text in enumerate(texts)],
    }
    (folder / "captions.json").write_text(json.dumps(content))
    files = {"images": str(folder / "images"), "annotations": str(folder / "captions.json")}
    return {"type": "CocoCaptions", **files, "min_count": 1}


def folders(folder: Path, texts: list[str]) -> dict:
    for text in texts:
        draw(folder / text)
    return {"type": "ImageFolder", "folder": str(folder)}


@pytest.mark.parametrize("write", [regions, captions, folders], ids=lambda write: write.__name__)
def test_texts_are_found_if_transforms_flip(tmp_path, write):
    spec = write(tmp_path, TEXTS)
    flips = {"type": "ClassificationTrainTransforms", "size": 32} if write is folders else FLIPS

    def found(transforms):
        return find_mirrored_texts(DataSettings(train=spec | {"transforms": transforms}).dataset("train"))

    assert {*found(flips)} == {*TEXTS}
    assert found(flips | {"flip_probability": 0.0}) == [] and found(None) == []


def test_other_words_are_not_found(tmp_path):
    spec = regions(tmp_path, ["a bright leftover", "an upright copyright"])
    assert find_mirrored_texts(DataSettings(train=spec | {"transforms": FLIPS}).dataset("train")) == []


def test_flips_are_found_in_mosaics_and_in_every_epoch(tmp_path):
    draw(tmp_path / "images")
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": 64, "height": 64} for k in range(2)],
        "annotations": [],
        "categories": [{"id": 1, "name": "turnleft"}, {"id": 2, "name": "turnright"}],
    }
    (tmp_path / "signs.json").write_text(json.dumps(content))
    spec = {"type": "CocoDetection", "images": str(tmp_path / "images"), "annotations": str(tmp_path / "signs.json")}

    def found(first, last):
        stages = [{"type": "MultiImageTransforms", "mosaic": 0.5, "transforms": first}, last]
        by_epoch = {"type": "TransformsByEpoch", "until_shares": [0.6], "transforms": stages}
        return find_mirrored_texts(DataSettings(train=spec | {"transforms": by_epoch}).dataset("train"))

    still = FLIPS | {"flip_probability": 0.0}
    assert found(FLIPS, still) == found(still, FLIPS) == ["turnleft", "turnright"] and found(still, still) == []
    grid = {"type": "GridMosaic", "transforms": None, "otherwise": FLIPS, "tile": 64}
    assert find_mirrored_texts(DataSettings(train=spec | {"transforms": grid}).dataset("train"))


def test_names_of_classes_say_their_side_or_come_in_pairs():
    sided = ["leftArm", "turnRight", "LEFT_TURN", "left-hand", "Right1", "arrowleft", "arrowright", "左折", "à droite"]
    assert sided_names([*sided, "upright", "copyright", "cleft", "bright", "leftover"]) == sided


def test_training_and_doctor_warn_with_two_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("vitkit"), "handlers", [])
    spec = captions(tmp_path, [*TEXTS, "left of a block"])
    data = {"data.train": spec | {"transforms": FLIPS}, "data.val": {k: v for k, v in spec.items() if k != "min_count"}}
    vitkit.train("quickstart/captioning", run_dir="run", device="cpu", **data, **{"train.epochs": 1})
    message = "flip images, which makes texts such as 'the leftmost block' and 'a right-hand block' wrong."
    assert message in capsys.readouterr().err
    issues = diagnose({"data": {"train": spec | {"transforms": FLIPS}}}, only=["text"])
    (issue,) = (issue for issue in issues if issue.check == "mirrored texts")
    assert issue.verdict == "warn" and issue.details["texts"] == TEXTS


@pytest.mark.parametrize(
    ("names", "is_reported"), [(["front", "back"], True), (["earL", "earR"], False), (["tip"], False)]
)
def test_keypoints_without_pairs_are_reported_if_transforms_flip(tmp_path, names, is_reported):
    draw(tmp_path / "images")
    points = [20, 20, 2] * len(names)
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": 64, "height": 64} for k in range(2)],
        "annotations": [
            {"id": k, "image_id": k, "category_id": 1, "bbox": [9, 9, 30, 30], "area": 900, "iscrowd": 0}
            | {"keypoints": points, "num_keypoints": len(names)}
            for k in range(2)
        ],
        "categories": [{"id": 1, "name": "mouse", "keypoints": names, "skeleton": []}],
    }
    (tmp_path / "points.json").write_text(json.dumps(content))
    spec = {"type": "CocoDetection", "images": str(tmp_path / "images"), "annotations": str(tmp_path / "points.json")}
    spec |= {"keypoints": True, "transforms": FLIPS}
    assert has_unpaired_points(DataSettings(train=spec).dataset("train")) == is_reported
    still = spec | {"transforms": FLIPS | {"flip_probability": 0.0}}
    assert not has_unpaired_points(DataSettings(train=still).dataset("train"))
    issues = diagnose({"data": {"train": spec}}, only=["flips"])
    assert [issue.verdict for issue in issues] == ["warn"] * is_reported
