"""ODVG's lines of classes, and captions, written and read again."""

import json

import pytest
from helpers.federated import federated_truth
from helpers.located_texts import (
    CAPTION,
    HEIGHT,
    WIDTH,
    detection_line,
    grounding_line,
    write_flickr30k,
    write_images,
    write_mdetr,
    write_odvg,
    write_refcoco,
)

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.grounding import GroundingDataset
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.tools.data import convert


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images", "a.jpg", "b.jpg", "12.jpg")


def test_lines_of_classes_are_read_as_any_dataset_of_boxes(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", detection_line(), detection_line("b.jpg", []))
    dataset = CocoDetection(images, path)
    assert (dataset.classes, dataset.category_ids, len(dataset)) == (["dog", "cat"], [1, 4], 2)
    assert [dataset.classes[k] for k in dataset[0]["target"]["labels"]] == ["cat", "dog"]
    boxes = [annotation["bbox"] for annotation in dataset.ground_truth()["annotations"]]
    assert boxes == [[1, 2, 10, 10], [5, 5, 15, 20]]


def test_coco_survives_a_detour_with_splits_and_classes_without_objects(tmp_path, images):
    content = dict(
        images=[dict(id=k, file_name=name, width=WIDTH, height=HEIGHT) for k, name in enumerate(("a.jpg", "b.jpg"))],
        annotations=[dict(id=1, image_id=0, category_id=7, bbox=[1.5, 2, 10.25, 9], area=92, iscrowd=0)],
        categories=[dict(id=k, name=name) for k, name in ((3, "cat"), (7, "dog"), (9, "bird"))],
    )
    (tmp_path / "coco").mkdir()
    for split, number in (("train", 0), ("val", 1)):
        part = {**content, "images": content["images"][number : number + 1]}
        part["annotations"] = content["annotations"] if number == 0 else []
        (tmp_path / "coco" / f"instances_{split}.json").write_text(json.dumps(part))
    out = tmp_path / "odvg"
    convert.main([str(tmp_path / "coco"), "--images", str(images), "--to", "odvg", "--out", str(out)])
    data = read_annotations(out, images)
    assert data.format == "odvg" and {k: len(v) for k, v in data.splits.items()} == {"train": 1, "val": 1}
    assert data.categories == [dict(id=k, name=name) for k, name in enumerate(("cat", "dog", "bird"))]
    assert [(a["category_id"], a["bbox"]) for a in data.annotations] == [(1, [1.5, 2, 10.25, 9])]
    line = json.loads((out / "train.jsonl").read_text())
    assert line["detection"]["instances"] == [dict(bbox=[1.5, 2, 11.75, 11], label=1, category="dog")]


def test_lvis_becomes_odvg_and_what_it_loses_is_printed(tmp_path, capsys):
    truth = federated_truth(num_images=2)
    names = [f"{image['id']:012}.jpg" for image in truth["images"]]
    write_images(tmp_path / "coco" / "train2017", *names)
    for image in truth["images"]:
        image |= dict(width=WIDTH, height=HEIGHT)
    for annotation in truth["annotations"]:
        annotation |= dict(bbox=[1, 2, 8, 9], segmentation=[])
    (tmp_path / "lvis.json").write_text(json.dumps(truth))
    out = tmp_path / "odvg"
    convert.main([str(tmp_path / "lvis.json"), "--images", str(tmp_path / "coco"), "--to", "odvg", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "lost: 2 lists of the classes that an image is annotated for: train2017/000000000005.jpg" in printed
    dataset = GroundingDataset(tmp_path / "coco", out / "annotations.jsonl", label_map=out / "label_map.json")
    assert dataset.classes == [category["name"] for category in truth["categories"]]
    assert dataset.num_objects == len(truth["annotations"]) and dataset[0]["target"]["boxes_cxcywh"].shape[1] == 4


@pytest.mark.parametrize(
    ("format", "write", "split", "counts"),
    [
        ("flickr30k", write_flickr30k, "val", "2 captions of 1 images, 3 phrases with 5 boxes"),
        ("refcoco", write_refcoco, "testA", "1 captions of 1 images, 1 phrases with 1 boxes"),
        ("mdetr", lambda folder: write_mdetr(folder.with_suffix(".json")), None, "3 phrases with 4 boxes"),
    ],
)
def test_captions_become_odvg_and_are_the_same_samples(tmp_path, images, capsys, format, write, split, counts):
    source, out = write(tmp_path / "source"), tmp_path / "odvg"
    options = [] if split is None else ["--split", split]
    convert.main([str(source), "--from", format, *options, "--to", "odvg", "--out", str(out)])
    assert counts in capsys.readouterr().out
    original = GroundingDataset(images, source, format=format, split=split)
    written = GroundingDataset(images, out / f"{split or 'annotations'}.jsonl")
    assert len(written) == len(original)
    for index in range(len(original)):
        ours, theirs = written[index]["target"], original[index]["target"]
        assert (ours["phrases"], ours.get("phrase_spans")) == (theirs["phrases"], theirs.get("phrase_spans"))
        assert ours["boxes_cxcywh"].tolist() == theirs["boxes_cxcywh"].tolist()
        assert written.located(index).regions.tolist() == original.located(index).regions.tolist()


def test_captions_are_not_read_as_classes_nor_written_as_another_format(tmp_path, images):
    path = write_odvg(tmp_path / "train.jsonl", grounding_line(caption=CAPTION))
    with pytest.raises(DataError, match=r"train.jsonl line 1: has a caption, which only dict\(type='GroundingDataset'"):
        CocoDetection(images, path)
    with pytest.raises(SystemExit, match="--from refcoco: captions are only written as ODVG. Add --to odvg"):
        convert.main([str(write_refcoco(tmp_path / "r")), "--from", "refcoco", "--out", str(tmp_path / "o")])


def test_a_label_with_two_names_is_an_error(tmp_path, images):
    lines = [dict(bbox=[1, 2, 11, 12], label=1, category=name) for name in ("cat", "dog")]
    path = write_odvg(tmp_path / "train.jsonl", detection_line(instances=lines))
    with pytest.raises(DataError, match="train.jsonl line 1: label 1 is 'dog', and 'cat' before"):
        CocoDetection(images, path)
