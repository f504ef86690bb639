"""Files of COCO in folders, their ids and splits, and what other tools write in that form."""

import json
from pathlib import Path

import pytest
from helpers.annotation_files import SQUARE, coco, draw, draw_images, named_boxes, write
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.data.formats.coco import read_coco
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_datasets
from vitkit.errors import DataError
from vitkit.tools.data import convert


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (("train.json", "val.json"), ("train", "val")),
        (("annotations/instances_train2017.json", "annotations/instances_val2017.json"), ("train2017", "val2017")),
        (("train/_annotations.coco.json", "valid/_annotations.coco.json"), ("train", "valid")),
    ],
)
def test_images_of_one_name_in_two_splits_of_coco_are_told_apart(tmp_path, files, folders):
    train, val = folders
    draw_images(tmp_path, f"{train}/1.jpg", f"{val}/1.jpg", f"{val}/2.jpg")
    for file in files:
        images = [{"id": k, "file_name": f"{k}.jpg", "width": 40, "height": 20} for k in (1, 2)]
        content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / file, json.dumps(content))
    data = read_annotations(tmp_path)
    names = {split: [image["file_name"] for image in data.split(split).images] for split in data.splits}
    # The second image of train does not exist; that of val is not taken for it.
    assert names == {"train": [f"{train}/1.jpg"], "val": [f"{val}/1.jpg", f"{val}/2.jpg"]}
    assert list(data.left_out.values()) == [["2.jpg"]]


@pytest.mark.parametrize(("first", "kept"), [(70, [70, 71, 80, 81]), (80, [1, 2, 3, 4])])
def test_ids_of_coco_are_kept_where_the_files_of_a_folder_do_not_share_one(tmp_path, first, kept):
    draw_images(tmp_path, "train/0.jpg", "train/1.jpg", "val/0.jpg", "val/1.jpg")
    for split, number in (("train", first), ("val", 80)):
        images = [{"id": number + k, "file_name": f"{k}.jpg", "width": 40, "height": 20} for k in (0, 1)]
        objects = [{"id": i["id"], "image_id": i["id"], "category_id": 5, "bbox": [1, 1, 5, 5]} for i in images]
        content = {"images": images, "annotations": objects, "categories": [{"id": 5, "name": "cat"}]}
        write(tmp_path / f"{split}.json", json.dumps(content))
    data = read_annotations(tmp_path)
    assert [image["id"] for image in data.images] == kept and data.splits == {"train": kept[:2], "val": kept[2:]}
    assert [(a["id"], a["image_id"]) for a in data.annotations] == [(k, k) for k in kept]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        # Named by their folder, images of another split are read, wherever the folders of the splits are.
        (
            {"train": ["val/1.jpg"], "val": ["1.jpg"]},
            {"train": ["images/{}/val/1.jpg"], "val": ["images/{}/val/1.jpg"]},
        ),
        # A folder of test images has no annotations, and its names begin anew.
        ({"train": ["1.jpg"]}, {"train": ["images/{}/train/1.jpg"]}),
    ],
)
@pytest.mark.parametrize("inner", [".", "photos"])
def test_images_of_coco_are_found_in_folders_of_splits(tmp_path, inner, listed, expected):
    draw_images(tmp_path / "images" / inner, "train/1.jpg", "val/1.jpg", "test/1.jpg")
    for split, names in listed.items():
        images = [{"id": k, "file_name": name, "width": 40, "height": 20} for k, name in enumerate(names)]
        content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / f"annotations/instances_{split}.json", json.dumps(content))
    data = read_annotations(tmp_path, tmp_path)
    found = {split: [image["file_name"] for image in data.split(split).images] for split in data.splits}
    assert found == {k: [name.format(inner).replace("/./", "/") for name in names] for k, names in expected.items()}


@pytest.mark.parametrize(
    ("name", "split"),
    [("latest", "latest"), ("instances_test2017", "test"), ("cells-test", "test"), ("minival", "val")],
)
def test_split_of_coco_is_named_by_its_file(tmp_path, name, split):
    draw_images(tmp_path, "1.jpg")
    images = [{"id": 1, "file_name": "1.jpg", "width": 40, "height": 20}]
    content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    write(tmp_path / f"{name}.json", json.dumps(content))
    assert list(read_annotations(tmp_path).splits) == [split]


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (("annotations/instances_train2017.json", "annotations/instances_val2017.json"), "train2017"),
        (("train/_annotations.coco.json", "valid/_annotations.coco.json"), "train"),
    ],
)
def test_objects_of_a_split_of_coco_without_photos_are_not_on_those_of_another_one(tmp_path, files, folder):
    draw_images(tmp_path, f"{folder}/1.jpg", f"{folder}/2.jpg")
    for x, file in enumerate(files, start=1):
        images = [{"id": k, "file_name": f"{k}.jpg", "width": 40, "height": 20} for k in (1, 2)]
        objects = [{"id": k, "image_id": k, "category_id": 1, "bbox": [x, 2, 5, 5]} for k in (1, 2)]
        content = {"images": images, "annotations": objects, "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / file, json.dumps(content))
    data = read_annotations(tmp_path)
    assert data.splits == {"train": [1, 2]} and not data.notes
    assert named_boxes(data) == [(f"{folder}/{k}.jpg", "cat", [1, 2, 5, 5]) for k in (1, 2)]
    assert data.left_out == {
        f"images that {files[1].rpartition('/')[2]} lists but the folder does not have": ["1.jpg", "2.jpg"]
    }


def test_splits_of_coco_may_share_the_folder_of_one(tmp_path):
    draw_images(tmp_path, "train/1.jpg", "train/2.jpg")
    for k, split in ((1, "train"), (2, "val")):
        images = [{"id": 1, "file_name": f"{k}.jpg", "width": 40, "height": 20}]
        content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / f"{split}.json", json.dumps(content))
    data = read_annotations(tmp_path)
    assert [image["file_name"] for image in data.images] == ["train/1.jpg", "train/2.jpg"] and not data.left_out


def test_coco_s_own_layout_is_read_by_its_files_of_instances(tmp_path):
    """person_keypoints_* lists the same images again, with the one class that has keypoints."""
    for split in ("train2017", "val2017"):
        (tmp_path / split).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / split / "1.jpg")
        image = dict(id=1 + (split == "val2017"), file_name="1.jpg", width=8, height=8)
        box = dict(id=image["id"], image_id=image["id"], category_id=1, bbox=[1, 1, 4, 4], area=16, iscrowd=0)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        for name, categories in (
            ("instances", [dict(id=1, name="person"), dict(id=2, name="bicycle")]),
            ("person_keypoints", [dict(id=1, name="person", keypoints=["nose"], skeleton=[])]),
        ):
            path = tmp_path / "annotations" / f"{name}_{split}.json"
            path.write_text(json.dumps(dict(images=[image], annotations=[box], categories=categories)))
    data = read_coco(tmp_path, None)
    assert [category["name"] for category in data.categories] == ["person", "bicycle"]
    assert len(data.images) == len(data.annotations) == 2
    assert sum("person_keypoints_" in note and "left out" in note for note in data.notes) == 2


def test_texts_as_ids_are_numbered(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    coco(tmp_path, {"id": "5f82c2d9-cfeb"}, {"id": "b8e8cd4e-a93d", "bbox": [1, 1, 9, 9]})
    convert.main(["own.json", "--images", ".", "--fix", "ids", "--out", "fixed.json"])
    assert [a["id"] for a in json.loads(Path("fixed.json").read_text())["annotations"]] == [1, 2]
    assert "annotations with texts as ids, numbered from 1: 2" in capsys.readouterr().out
    assert CocoDetection(tmp_path, "own.json").num_objects == 2


def test_masks_that_are_all_crowds_are_named_with_a_repair(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    file = coco(tmp_path, {"iscrowd": 1, "segmentation": SQUARE}, {"iscrowd": 1, "segmentation": SQUARE})
    spec = {"type": "CocoDetection", "images": ".", "annotations": file.name, "masks": True}
    with pytest.raises(DataError, match=r"nothing to learn: all 2 are crowd regions \(iscrowd: 1\).*--fix crowds"):
        build_datasets(DataSettings(train=spec, val=spec))
    convert.main(["own.json", "--out", "copy.json"])
    assert "all 2 objects are crowd regions (iscrowd: 1), which are not trained on" in capsys.readouterr().out
    convert.main(["own.json", "--images", ".", "--fix", "crowds", "--out", "fixed.json"])
    assert CocoDetection(".", "fixed.json", masks=True).num_objects == 2


def test_whole_numbers_that_were_written_as_floats_are_read(tmp_path):
    draw(tmp_path / "a.png")
    floats = {"id": 1.0, "image_id": 7.0, "category_id": 1.0, "iscrowd": 0.0}
    file = coco(tmp_path, floats, floats | {"id": 2.0}, id=7.0, width=40.0)
    data = read_annotations(file, tmp_path)
    assert [(a["id"], a["image_id"], type(a["category_id"])) for a in data.annotations] == [(1, 7, int), (2, 7, int)]
    assert data.notes == ["whole numbers written as 1.0, such as ids: 10"] and data.images[0]["width"] == 40
    assert CocoDetection(tmp_path, file).num_objects == 2
    with pytest.raises(DataError, match="annotation 1.5 .*has id 1.5; expected a whole number"):
        read_annotations(coco(tmp_path, {"id": 1.5}), tmp_path)
