"""Label Studio's JSON, as version 1.12 exports it."""

import json

import numpy as np
import pytest
from PIL import Image

from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.io.segmentations import decode_segmentation


def task(image, *results, key="annotations", **data):
    return {"id": 7, key: [{"id": 1, "result": list(results)}], "data": {"image": image, **data}}


def result(kind, label, **value):
    return {"type": kind, "original_width": 80, "value": {"rotation": 0, kind: [label]} | value}


def box(label, x, y, width, height, **value):
    return result("rectanglelabels", label, x=x, y=y, width=width, height=height, **value)


def read(tmp_path, *tasks):
    for name in ("1.png", "2.png"):
        Image.new("RGB", (80, 60)).save(tmp_path / name)
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    return read_annotations(tmp_path / "export.json")


@pytest.mark.parametrize(
    "image", ["/data/upload/3/0a1b2c3d-1.png", "/data/local-files/?d=photos/1.png", "s3://bucket/1.png", "1.png"]
)
def test_images_are_found_by_the_names_that_label_studio_gives_them(image, tmp_path):
    data = read(tmp_path, task(image, box("cat", 12.5, 50, 25, 25)))
    assert data.format == "label-studio"
    assert [i["file_name"] for i in data.images] == ["1.png"]
    assert data.annotations[0]["bbox"] == [10, 30, 20, 15]


def test_rotated_boxes_turn_clockwise_about_their_first_corner(tmp_path):
    # 40x15 pixels, turned by 90 degrees about (40, 15): down and to the left.
    data = read(tmp_path, task("1.png", box("cat", 50, 25, 50, 25, rotation=90)))
    assert data.annotations[0]["bbox"] == [25, 15, 15, 40]


def test_polygons_and_ellipses_become_masks(tmp_path):
    polygon = result("polygonlabels", "cat", points=[[0, 0], [50, 0], [50, 50], [0, 50]])
    ellipse = result("ellipselabels", "dog", x=50, y=50, radiusX=25, radiusY=25)
    data = read(tmp_path, task("1.png", polygon, ellipse))
    masks = [decode_segmentation(a["segmentation"], 60, 80) for a in data.annotations]
    assert masks[0].sum() == 40 * 30 and masks[0][:30, :40].all()
    assert masks[1].sum() == pytest.approx(np.pi * 20 * 15, rel=0.02)


def test_what_cannot_be_read_is_counted(tmp_path):
    brush = result("brushlabels", "cat", format="rle", rle=[1, 2])
    nameless = {"type": "rectanglelabels", "value": {"x": 1, "y": 1, "width": 9, "height": 9}}
    unlabeled = {"id": 8, "annotations": [], "data": {"image": "2.png"}}
    data = read(tmp_path, task("1.png", brush, nameless, box("cat", 0, 0, 50, 50)), unlabeled, task("gone.png"))
    assert {reason: len(names) for reason, names in data.left_out.items()} == {
        "results of type 'brushlabels'": 1,
        "shapes without a label": 1,
        "images that nobody has labeled": 1,
        "images that the JSON lists but the folder does not have": 1,
    }
    assert len(data.annotations) == 1


def test_predictions_are_read_if_nothing_is_annotated(tmp_path):
    predicted = task("1.png", box("cat", 0, 0, 50, 50), key="predictions", split="val")
    assert read(tmp_path, predicted).splits == {"val": [1]}
    assert len(read(tmp_path, predicted, task("2.png", box("dog", 0, 0, 50, 50))).images) == 1


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"image": "1.png", "data": 1, "annotations": []}], "not a list of Label Studio's tasks. Export it as 'JSON'"),
        ([task("1.png", {"type": "rectanglelabels", "value": 3})], "task 7: a result is .*expected an object"),
        ([task("1.png", box("cat", "x", 0, 1, 1))], "task 7: a coordinate in percent"),
        ([task("1.png", box("cat", 0, 0, 9, 9, rectanglelabels=5.5))], "task 7: its rectanglelabels are 5.5; expected"),
        ([task("1.png") | {"annotations": 5}], "task 7: its annotations are 5; expected a list"),
        ([task("1.png", result("polygonlabels", "cat", points=[[0, 0]]))], "task 7: a polygon has points"),
        ([{"id": 7, "annotations": [], "data": {"text": "a dog"}}], "task 7: its data names no image"),
        (
            [task("gone.png")],
            r"has no usable image below '.*': left out 1 images that the JSON lists but.*, such as gone.png\. Give",
        ),
    ],
)
def test_errors_name_the_task(tasks, message, tmp_path):
    with pytest.raises(DataError, match=message):
        read(tmp_path, *tasks)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_shapes_on_an_image_that_was_turned_on_the_screen_are_stored_as_on_the_image(degrees, tmp_path):
    turned = box("cat", 12.5, 50, 25, 25) | {"image_rotation": degrees, "original_width": 60, "original_height": 80}
    data = read(tmp_path, task("1.png", turned))
    assert data.annotations[0]["bbox"] == [10, 30, 20, 15]
    assert not data.left_out


def test_an_image_that_was_annotated_with_another_shape_is_an_error(tmp_path):
    scaled = box("cat", 12.5, 50, 25, 25) | {"original_width": 160, "original_height": 120}
    assert read(tmp_path, task("1.png", scaled)).annotations[0]["bbox"] == [10, 30, 20, 15]
    other = scaled | {"original_height": 160}
    with pytest.raises(DataError, match=r"task 7: image '1.png' is 80x60 pixels .* and annotated as 160x160\. Give"):
        read(tmp_path, task("1.png", other))


def test_annotation_that_is_marked_as_the_truth_is_read(tmp_path):
    two = task("1.png", box("cat", 0, 0, 10, 10))
    two["annotations"].append({"id": 2, "ground_truth": True, "result": [box("dog", 50, 50, 25, 25)]})
    data = read(tmp_path, two)
    assert [annotation["bbox"] for annotation in data.annotations] == [[40, 30, 20, 15]]


def test_task_of_several_images_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"task 7: its data names 2 images, such as '1\.png' and '2\.png'"):
        read(tmp_path, task("1.png", box("cat", 0, 0, 10, 10), right="2.png"))


@pytest.mark.parametrize("key", ["tasks", "results"])
def test_pages_of_the_api_are_read_together(tmp_path, key):
    for number, total in ((1, 3), (2, 3)):
        Image.new("RGB", (80, 60)).save(tmp_path / f"{number}.png")
        page = {key: [task(f"{number}.png", box("cat", 10, 10, 50, 50))], "total": total, "count": total, "next": None}
        (tmp_path / f"page_{number}.json").write_text(json.dumps(page))
    data = read_annotations(tmp_path)
    assert data.format == "label-studio" and [image["file_name"] for image in data.images] == ["1.png", "2.png"]
    assert [annotation["bbox"] for annotation in data.annotations] == [[8, 6, 40, 30]] * 2
    assert "1 of 3 tasks are on pages that are not here: export all as 'JSON'" in data.notes
    data = read_annotations(tmp_path / "page_1.json")
    assert len(data.images) == 1 and "2 of 3 tasks are on pages that are not here: export all as 'JSON'" in data.notes


def test_a_date_before_a_name_is_part_of_it(tmp_path):
    Image.new("RGB", (80, 60)).save(tmp_path / "20240101-1.png")
    names = ["/data/local-files/?d=20240101-2.png", "/data/upload/3/20240101-1.png", "/data/upload/3/12345678-2.png"]
    data = read(tmp_path, *(task(name, box("cat", 10, 10, 10, 10)) for name in names))
    assert [image["file_name"] for image in data.images] == ["20240101-1.png", "2.png"]
    assert [*data.left_out.values()] == [["20240101-2.png"]]


def test_a_shape_with_labels_of_a_tag_of_its_own_is_read_and_relations_are_counted(tmp_path):
    value = {"x": 25, "y": 50, "width": 25, "height": 25}
    parts = [{"id": "r", "type": "rectangle", "value": value}, {"id": "r"} | result("labels", "cat", **value)]
    data = read(tmp_path, task("1.png", *parts, {"type": "relation", "from_id": "r", "to_id": "s"}))
    assert [annotation["bbox"] for annotation in data.annotations] == [[20, 30, 20, 15]]
    assert data.left_out == {"results of type 'rectangle'": ["1.png"], "relations between objects": ["1.png"]}


def test_a_byte_order_mark_and_a_hash_in_a_name_are_read(tmp_path):
    Image.new("RGB", (80, 60)).save(tmp_path / "e#1.png")
    content = json.dumps([task("/data/upload/3/0a1b2c3d-e#1.png", box("cat", 10, 10, 10, 10))])
    (tmp_path / "export.json").write_text(content, encoding="utf-8-sig")
    data = read_annotations(tmp_path / "export.json")
    assert data.format == "label-studio" and data.images[0]["file_name"] == "e#1.png"
