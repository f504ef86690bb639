"""Which format a folder or file is of, and what is said where it is of none."""

import json
from importlib import import_module

import pytest
from helpers.annotation_files import coco, draw, draw_images, named_boxes, voc, write, yolo
from helpers.processes import run_anew

from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import FORMATS, read_annotations
from vitkit.errors import ConfigError, DataError


def test_every_format_names_functions_of_its_module():
    for form in FORMATS.values():
        module = import_module(f"vitkit.data.formats.{form.module}")
        assert all(callable(vars(module)[name]) for name in (form.reader, *form.looks_like.values())), form.text


def test_readers_are_imported_when_their_format_is_met(tmp_path):
    draw_images(tmp_path, "images/a.jpg")
    image, box = dict(id=1, file_name="a.jpg", width=40, height=20), dict(id=1, image_id=1, category_id=1)
    parts = dict(images=[image], annotations=[box | dict(bbox=[1, 2, 3, 4])], categories=[dict(id=1, name="cat")])
    file = write(tmp_path / "boxes.json", json.dumps(parts))
    loaded = "sorted(name[20:] for name in sys.modules if name.startswith('vitkit.data.formats.'))"
    program = f"""
import sys
from vitkit.data.datasets.coco import CocoDetection
CocoDetection({str(tmp_path / "images")!r}, {str(file)!r})
print({loaded})
from vitkit.data.formats import read_annotations
read_annotations({str(file)!r}, {str(tmp_path / "images")!r})
print({loaded})
"""
    status, printed = run_anew(program)
    of_dataset, of_any = printed.splitlines()
    readers = {form.module for form in FORMATS.values()} - {"coco"}
    assert status == 0 and not readers & {*eval(of_any)} and "coco" in eval(of_any), of_any
    # Importing a dataset imports its package, of which GroundingDataset and SemanticFolder have readers of their own.
    assert not readers - {"class_files"} & {*eval(of_dataset)}, of_dataset


def test_folder_that_matches_two_formats_is_an_error(tmp_path):
    draw_images(tmp_path, "a.jpg")
    voc(tmp_path, "a", ("dog", 1, 1, 10, 5))
    write(tmp_path / "a.txt", "0 0.5 0.5 0.1 0.1\n")
    with pytest.raises(DataError, match=r"a\.txt.*a\.xml.*format=yolo or format=voc"):
        CocoDetection(tmp_path, tmp_path)
    assert len(CocoDetection(tmp_path, tmp_path, format="voc")) == 1


def test_folder_of_unknown_format_or_of_images_alone_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has no files"):
        read_annotations(tmp_path)
    draw_images(tmp_path, "a.jpg")
    with pytest.raises(DataError, match=r"has 1 image and no annotations\. Give .*coco, yolo"):
        read_annotations(tmp_path)
    write(tmp_path / "a.md", "a cat")
    with pytest.raises(DataError, match="none of the supported formats"):
        read_annotations(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"images": [', "not valid JSON at line 1.*truncated"), ("", "0 bytes.*It is empty"), ("{}", "none of the supp")],
)
def test_only_file_says_what_is_wrong_with_it(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_annotations(write(tmp_path / "labels.json", text), tmp_path)


def test_dataset_reads_a_split_of_another_format(tmp_path):
    draw_images(tmp_path, "images/train/a.jpg", "images/val/b.jpg")
    write(tmp_path / "labels/train/a.txt", "0 0 0 0.5 0 0.5 0.5\n")
    path = write(tmp_path / "data.yaml", "train: images/train\nval: images/val\nnames: [cat]\n")
    with pytest.raises(DataError, match=r"train \(1 images\), val \(1 images\)"):
        CocoDetection(None, path)
    dataset = CocoDetection(tmp_path, path, split="train", masks=True)
    assert dataset.classes == ["cat"] and dataset[0]["target"]["masks"].sum() > 90
    assert len(CocoDetection(None, path, names=["b"])) == 1


def test_unreadable_image_is_named(tmp_path):
    draw_images(tmp_path, "a.jpg", "c.jpg")
    write(tmp_path / "b.jpg", "no image")
    for name in "abc":
        write(tmp_path / f"{name}.txt", "0 0.5 0.5 0.1 0.1\n")
    data = read_annotations(tmp_path)
    assert [image["file_name"] for image in data.images] == ["a.jpg", "c.jpg"]
    with pytest.raises(DataError, match=r"b\.jpg.*1 of the images"):
        CocoDetection(tmp_path, tmp_path)
    rows = "\n".join(f"{name}.jpg,1,1,5,5,cat,{split}" for name, split in zip("abc", ("train", "train", "val")))
    path = write(tmp_path / "boxes.csv", f"file,xmin,ymin,xmax,ymax,class,split\n{rows}\n")
    with pytest.raises(DataError, match=r"b\.jpg.*1 of the images"):
        CocoDetection(tmp_path, path, split="train")


def test_what_a_dataset_leaves_out_is_logged_once(tmp_path, caplog):
    draw_images(tmp_path, "a.jpg", "b.jpg")
    dataset = CocoDetection(tmp_path, write(tmp_path / "boxes.csv", "a.jpg,10,5,30,15,cat\n"))
    dataset.ground_truth()
    assert caplog.text.count("left out 1 images that are in no line") == 1


def test_repeated_keys_are_an_error(tmp_path):
    draw(tmp_path / "a.png")
    text = coco(tmp_path, {}).read_text().replace('"area": 200', '"bbox": [1, 1, 2, 2]')
    with pytest.raises(DataError, match="own.json: an object has the key 'bbox' twice"):
        read_annotations(write(tmp_path / "own.json", text), tmp_path)
    text = '{"shapes": [], "shapes": [{"label": "cat", "points": [[4, 4], [9, 9]], "shape_type": "rectangle"}]}'
    with pytest.raises(DataError, match="the key 'shapes' twice"):
        read_annotations(write(tmp_path / "labelme" / "a.json", text), tmp_path, format="labelme")
    file = yolo(tmp_path, "0.5 0.5 0.5 0.5")
    with pytest.raises(DataError, match="data.yaml' line 2: the key 'train' occurs twice"):
        read_annotations(write(file, "train: images\ntrain: images\nnames: [cat]\n"))
    with pytest.raises(DataError, match="line 5: the key '0' occurs twice"):
        read_annotations(write(file, "train: images\nval: images\nnames:\n  0: cat\n  0: dog\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"image": "a.jpg", "label": [{"x": 1, "rectanglelabels": ["cat"], "original_width": 8}]}],
            "is Label Studio's JSON-MIN: export it as JSON",
        ),
        ({"objects": [{"classTitle": "cat"}]}, "is Supervisely's JSON: export it as COCO"),
        ({"item": {"name": "a.png", "slots": []}, "annotations": []}, "is Darwin JSON of V7: export it as COCO"),
        ({"project": {}, "file": {"1": {"fid": 1}}, "view": {"1": {"fid_list": [1]}}}, "is VIA 3's JSON"),
        (
            [{"image": "a.png", "annotations": [{"label": "cat", "coordinates": {"x": 9, "y": 9, "width": 4}}]}],
            "is Create ML's JSON",
        ),
        ({"images": [], "annotations": []}, "looks like COCO's JSON, but has no list 'categories'"),
    ],
)
def test_json_of_other_tools_is_named(tmp_path, content, message):
    draw(tmp_path / "a.png")
    file = write(tmp_path / "own.json", content)
    for annotations in (file, tmp_path):
        with pytest.raises(DataError, match=rf"own\.json' {message}"):
            read_annotations(annotations, tmp_path)


def test_captions_are_not_asked_for_categories(tmp_path):
    file = write(tmp_path / "own.json", {"images": [], "annotations": [{"image_id": 1, "caption": "a cat"}]})
    with pytest.raises(DataError, match="is in none of the supported formats"):
        read_annotations(file, tmp_path)


def test_splits_of_karpathy_are_read(tmp_path):
    for k in range(4):
        draw(tmp_path / "val2014" / f"{k}.png")
    splits = ["train", "restval", "val", "test"]
    images = [
        {"filename": f"{k}.png", "filepath": "val2014", "split": split, "cocoid": 10 + k, "imgid": k,
         "sentences": [{"raw": f"a cat {n}", "tokens": ["a", "cat"]} for n in range(5)]}
        for k, split in enumerate(splits)
    ]  # fmt: skip
    file = write(tmp_path / "dataset.json", {"dataset": "coco", "images": images})
    train = CocoCaptions(tmp_path, file, split="train", min_count=1)
    assert (
        train.image_ids.tolist() == [10, 11] and train.references(0)[0] == "a cat 0" and len(train.references(1)) == 5
    )
    assert CocoCaptions(tmp_path / "val2014", file, split="val").image_path(0) == tmp_path / "val2014" / "2.png"
    with pytest.raises(DataError, match=r"split is None; it has train \(2 images\), val \(1 image\), test \(1 image\)"):
        CocoCaptions(tmp_path, file)
    captions = {"images": [{"id": 1, "file_name": "val2014/0.png"}], "annotations": [{"image_id": 1, "caption": "a"}]}
    with pytest.raises(ConfigError, match="COCO's format, which has no splits"):
        CocoCaptions(tmp_path, write(tmp_path / "captions.json", captions), split="train")


def test_the_folder_that_an_archive_puts_around_its_content_is_entered(tmp_path):
    inner = tmp_path / "unpacked" / "pets" / "pets v2"
    draw_images(inner, "train/images/a.jpg", "valid/images/b.jpg")
    for name in ("train/labels/a.txt", "valid/labels/b.txt"):
        write(inner / name, "1 0.5 0.5 0.5 0.5\n")
    write(inner / "data.yaml", "train: train/images\nval: valid/images\nnames: [cat, dog]\n")
    write(tmp_path / "unpacked/.DS_Store", "")
    data = read_annotations(tmp_path / "unpacked")
    assert data.splits == {"train": [1], "val": [2]} and data.folder == inner
    assert [name for _, name, _ in named_boxes(data)] == ["dog", "dog"]
