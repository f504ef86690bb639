"""Predictions written as annotations for tools of labeling."""

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.apps.datasets.writing import STAYING, WRITERS
from vitkit.apps.inference.labels import PredictedImages, write_labels
from vitkit.apps.inference.prediction import Prediction
from vitkit.data.formats import read_annotations
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.errors import ConfigError, DataError
from vitkit.io.segmentations import decode_segmentation
from vitkit.tools import predict

CLASSES = ["cell", "platelet"]
SIZE = (80, 60)


def predictions(tmp_path, *, masks: bool = False):
    """The content of a predictions.json: two images, one below a subfolder and without an object."""
    images = []
    for number, name in enumerate(("b/2.png", "1.png")):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE).save(path)
        fields = dict(
            boxes_xyxy=torch.tensor([[10.25, 5, 30, 25.5], [40, 20, 80, 60]]),
            scores=torch.tensor([0.9, 0.55]),
            labels=torch.tensor([1, 0]),
        )
        if masks:
            fields["masks"] = torch.zeros(2, SIZE[1], SIZE[0], dtype=torch.bool)
            fields["masks"][0, 5:25, 10:30] = True
            fields["masks"][1, 20:60, 40:80] = True
            fields["masks"][1, 30:40, 50:60] = False  # a hole
        if number:
            fields = {key: value[:0] for key, value in fields.items()}
        prediction = Prediction(str(path), np.zeros((SIZE[1], SIZE[0], 3), np.uint8), fields, CLASSES)
        images.append(prediction.to_json())
    return {"classes": CLASSES, "images": images}


def objects(data):
    names = {category["id"]: category["name"] for category in data.categories}
    files = {image["id"]: image["file_name"].rpartition("/")[2] for image in data.images}
    return sorted((files[a["image_id"]], names[a["category_id"]], a["bbox"]) for a in data.annotations)


@pytest.mark.parametrize("format", WRITERS)
def test_boxes_survive_every_format(format, tmp_path):
    content = predictions(tmp_path)
    write_labels(content, format, tmp_path)
    photos = tmp_path / "photos" if format == "coco" else None
    data = read_annotations(tmp_path / format, photos, format=format)
    expected = [("2.png", "cell", [40, 20, 40, 40]), ("2.png", "platelet", [10.25, 5, 19.75, 20.5])]
    assert [(name, label) for name, label, _ in objects(data)] == [(name, label) for name, label, _ in expected]
    np.testing.assert_allclose([b for *_, b in objects(data)], [b for *_, b in expected], atol=0.01)
    assert len(data.images) == 2


@pytest.mark.parametrize(("format", "lowest_iou"), [("coco", 1), ("cvat", 1), ("yolo", 0.99), ("label-studio", 0.7)])
def test_masks_survive(format, lowest_iou, tmp_path, capsys):
    content = predictions(tmp_path, masks=True)
    expected = [decode_segmentation(found["mask"], SIZE[1], SIZE[0]) for found in content["images"][0]["objects"]]
    write_labels(content, format, tmp_path)
    data = read_annotations(tmp_path / format, tmp_path / "photos" if format == "coco" else None, format=format)
    read = [decode_segmentation(a["segmentation"], SIZE[1], SIZE[0]) for a in data.annotations]
    for mask in expected:
        assert max((mask & other).sum() / (mask | other).sum() for other in read) >= lowest_iou
    # Label Studio's polygons have no holes, which is said.
    assert ("holes, which become separate objects: 2" in capsys.readouterr().out) == (format == "label-studio")


@pytest.mark.parametrize("format", WRITERS)
def test_names_with_signs_of_addresses_and_xml_survive(format, tmp_path):
    content = predictions(tmp_path)
    name = "a%20&b#1?=ü 'x\".png"
    content["images"][0]["image"] = str((tmp_path / "photos/b/2.png").rename(tmp_path / "photos" / name))
    write_labels(content, format, tmp_path)
    data = read_annotations(tmp_path / format, tmp_path / "photos" if format in STAYING else None, format=format)
    assert sorted(Path(image["file_name"]).name for image in data.images) == ["1.png", name]
    assert len(data.annotations) == 2


def test_a_name_that_is_not_text_is_said(tmp_path):
    content = predictions(tmp_path)
    other = tmp_path / os.fsdecode(b"photos/\xe9.png")
    content["images"][1]["image"] = str((tmp_path / "photos/1.png").rename(other))
    with pytest.raises(DataError, match=r"review_order\.txt: a name is not text that can be stored"):
        write_labels(content, "coco", tmp_path)


def test_scores_are_kept_where_the_format_has_a_place(tmp_path):
    content = predictions(tmp_path)
    for format in ("coco", "cvat", "label-studio"):
        write_labels(content, format, tmp_path)
    written = json.loads((tmp_path / "coco" / "instances.json").read_text())["annotations"]
    assert [round(annotation["score"], 2) for annotation in written] == [0.9, 0.55]
    xml = (tmp_path / "cvat" / "annotations.xml").read_text()
    assert '<attribute name="score">0.900</attribute>' in xml and 'source="auto"' in xml
    tasks = json.loads((tmp_path / "label-studio" / "tasks.json").read_text())
    (prediction,) = tasks[0]["predictions"]
    assert prediction["score"] == pytest.approx(0.55) and prediction["result"][0]["score"] == pytest.approx(0.9)
    assert tasks[0]["data"]["image"] == "/data/local-files/?d=images/b/2.png"


def test_scores_of_cvat_are_read_again_but_not_those_of_shapes_that_people_drew(tmp_path):
    write_labels(predictions(tmp_path), "cvat", tmp_path)
    data = read_annotations(tmp_path / "cvat")
    assert sorted(annotation["score"] for annotation in data.annotations) == [0.55, 0.9]
    path = tmp_path / "cvat" / "annotations.xml"
    drawn = path.read_text().replace('source="auto"', 'source="manual"', 1)
    path.write_text(drawn.replace(">0.550<", ">uncertain<"))  # an attribute of the user's own
    assert not any("score" in annotation for annotation in read_annotations(tmp_path / "cvat").annotations)


def test_category_ids_are_those_of_the_training_data(tmp_path):
    content = predictions(tmp_path) | {"category_ids": [7, 3]}
    write_labels(content, "coco", tmp_path)
    data = read_annotations(tmp_path / "coco", tmp_path / "photos")
    assert data.categories == [{"id": 7, "name": "cell"}, {"id": 3, "name": "platelet"}]
    assert [annotation["category_id"] for annotation in data.annotations] == [3, 7]


def test_yolo_names_predicted_images_in_one_split(tmp_path, capsys):
    write_labels(predictions(tmp_path), "yolo", tmp_path)
    data = read_annotations(tmp_path / "yolo" / "data.yaml")
    assert {split: len(ids) for split, ids in data.splits.items()} == {"train": 2}
    assert "data.yaml has no val: add it before training" in capsys.readouterr().out


def test_the_least_certain_image_is_reviewed_first(tmp_path):
    content = predictions(tmp_path)
    content["images"].reverse()
    write_labels(content, "coco", tmp_path)
    lines = (tmp_path / "coco" / "review_order.txt").read_text().splitlines()
    # A score of 0.55 lies a tenth of the way from the threshold, 0.5, to 1.
    assert [line.partition(" ")[0] for line in lines] == ["0.900", "0.000"] and lines[0].endswith("2.png")


class ManyImages:
    """Entries of predictions.json that are made when they are iterated, as those of a folder's journal are."""

    def __init__(self, folder, image, count):
        self.folder, self.image, self.count = folder, image, count

    def __iter__(self):
        for number in range(self.count):
            objects = [{**found, "box_xyxy": [*found["box_xyxy"]]} for found in self.image["objects"] * 10]
            yield self.image | {"image": f"{self.folder}/{number}.png", "objects": objects}


@pytest.mark.parametrize("format", WRITERS)
def test_objects_are_not_all_in_memory(format, tmp_path):
    (image, _), peaks = predictions(tmp_path)["images"], []
    for count in (1, 15, 40):  # the first call imports
        photos = tmp_path / f"{count} photos"
        photos.mkdir()
        for number in range(count):
            (photos / f"{number}.png").hardlink_to(image["image"])
        tracemalloc.start()
        write_labels({"classes": CLASSES, "images": ManyImages(photos, image, count)}, format, tmp_path / f"{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The 20 objects of an image take 15 kB or more.
    assert (peaks[2] - peaks[1]) / 25 < 5000


def test_annotations_need_images_on_the_disk_and_objects(tmp_path):
    content = predictions(tmp_path)
    content["images"][0]["image"] = "https://example.org/a.jpg"
    with pytest.raises(DataError, match=r"example.org/a.jpg' is not a file on this disk"):
        PredictedImages(content["images"], CLASSES)
    with pytest.raises(ConfigError, match="the model predicts none"):
        write_labels({"classes": CLASSES, "images": [{"image": "a.jpg", "text": "a dog"}]}, "coco", tmp_path)


def test_predict_writes_labels_that_a_detector_can_be_trained_on(tmp_path, capsys):
    Image.fromarray(np.random.default_rng(0).integers(256, size=(96, 96, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    out = tmp_path / "out"
    arguments = [
        "shapes_detr",
        "--input",
        str(tmp_path / "a.png"),
        "--out",
        str(out),
        "--threshold",
        "0.01",
        "--no-draw",
    ]
    predict.main([*arguments, "--format", "cvat"])
    found = json.loads((out / "predictions.json").read_text())["images"][0]["objects"]
    data = read_annotations(out / "cvat")
    assert 0 < len(data.annotations) <= len(found)
    assert "review_order.txt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        predict.main([*arguments, "--format", "cvt"])
    assert "'cvt': expected coco, yolo, voc, cvat, label-studio" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["cvat", "label-studio"])
def test_polygons_end_at_the_border(format, tmp_path):
    predictions(tmp_path)
    data = AnnotatedImages("coco", tmp_path, tmp_path / "photos")
    polygon = [-20, 10, 40, 10, 40, 30, -20, 30]
    data.add_object(data.add_image("1.png", *SIZE), "cell", [-20, 10, 60, 20], segmentation=[polygon], score=0.5)
    WRITERS[format](data, tmp_path / "out", {})
    (found,) = read_annotations(tmp_path / "out").annotations
    assert found["bbox"] == [0, 10, 40, 20] and found["area"] == 800
