"""Annotations of other formats: what is read of each, how formats are told apart, and errors for wrong ones."""

import base64
import io
import json
from collections import Counter
from importlib import import_module

import numpy as np
import pytest
from helpers.processes import run_anew
from PIL import Image

from vitkit.apps.datasets.writing import WRITERS, join_polygons, outlines, write_voc
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.formats import FORMATS, detect_format, read_annotations
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.data.formats.coco import read_coco
from vitkit.errors import DataError
from vitkit.io.segmentations import decode_segmentation, polygon_box


def draw_images(folder, *names, size=(40, 20)):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (90, 120, 30)).save(path)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def boxes(data):
    """(file name, class, box) of each object."""
    files = {image["id"]: image["file_name"] for image in data.images}
    names = {category["id"]: category["name"] for category in data.categories}
    return [(files[a["image_id"]], names[a["category_id"]], a["bbox"]) for a in data.annotations]


VOC_OBJECT = (
    "<object><name>{}</name><difficult>1</difficult><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>"
    "<ymax>{}</ymax></bndbox></object>"
)


def voc(folder, name, *objects):
    body = "".join(VOC_OBJECT.format(*obj) for obj in objects)
    size = "<size><width>40</width><height>20</height></size>"
    return write(folder / f"{name}.xml", f"<annotation><filename>{name}.jpg</filename>{size}{body}</annotation>")


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


def test_yolo_is_read_from_the_layout_of_ultralytics(tmp_path):
    draw_images(tmp_path, "images/train/a.jpg", "images/train/empty.jpg", "images/val/b.jpg")
    write(tmp_path / "labels/train/a.txt", "1 0.5 0.5 0.5 0.2\n0 0 0 0.5 0 0.5 0.5\n")
    write(tmp_path / "labels/val/b.txt", "0 0.1 0.1 0.1 0.1\n")
    write(tmp_path / "data.yaml", "path: /elsewhere\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n")
    for data in (read_annotations(tmp_path / "data.yaml"), read_annotations(tmp_path)):
        assert data.format == "yolo" and {k: len(ids) for k, ids in data.splits.items()} == {"train": 2, "val": 1}
        assert [(name, box) for _, name, box in boxes(data)] == [
            ("dog", [10, 8, 20, 4]),
            ("cat", [0, 0, 20, 10]),
            ("cat", [2, 1, 4, 2]),
        ]
        assert data.annotations[1]["segmentation"] == [[0, 0, 20, 0, 20, 10]] and data.annotations[1]["area"] == 100


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


def test_labels_of_one_split_are_not_given_to_an_image_of_another(tmp_path):
    images, labels = tmp_path / "images", ("train/1", "val/1", "val/2")
    draw_images(images, "train/1.jpg", "val/2.jpg")  # val/1.jpg is missing
    for name in labels:
        voc(tmp_path / "voc" / name.partition("/")[0], name.partition("/")[2])
        content = {"shapes": [], "imagePath": f"{name[-1]}.jpg", "imageWidth": 40, "imageHeight": 20}
        write(tmp_path / f"labelme/{name}.json", json.dumps(content))
        draw_images(tmp_path / "maps", f"{name}.png")
        Image.new("L", (40, 20), 1).save(tmp_path / f"maps/{name}.png")
    rows = [f"{name}.jpg,1,1,5,5,cat" for name in labels]
    write(tmp_path / "boxes.csv", "\n".join(["file,xmin,ymin,xmax,ymax,class", *rows]))
    forms = {"voc": "voc", "labelme": "labelme", "semantic_maps": "maps", "csv": "boxes.csv"}
    for form, path in forms.items():
        data = read_annotations(tmp_path / path, images, format=form)
        assert [image["file_name"] for image in data.images] == ["train/1.jpg", "val/2.jpg"]
        assert len(data.left_out) == 1 and "1" in next(iter(data.left_out.values()))[0]
    write(images / "val.txt", "./val/1.jpg\n")
    write(images / "data.yaml", "train: train\nval: val.txt\nnames: [cat]\n")
    with pytest.raises(DataError, match=r"val\.txt' lists './val/1\.jpg', which is not below"):
        read_annotations(images / "data.yaml")


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
    assert boxes(data) == [(f"{folder}/{k}.jpg", "cat", [1, 2, 5, 5]) for k in (1, 2)]
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


def test_yolo_is_read_from_the_layout_of_roboflow(tmp_path):
    draw_images(tmp_path, "train/images/a.jpg", "valid/images/b.jpg")
    write(tmp_path / "train/labels/a.txt", "0 0.5 0.5 1 1\n")
    write(tmp_path / "data.yaml", "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnames: [cat]\n")
    data = read_annotations(tmp_path / "data.yaml")
    assert boxes(data) == [("train/images/a.jpg", "cat", [0, 0, 40, 20])]
    assert list(data.splits) == ["train", "val"] and "test" in data.notes[0]


@pytest.mark.parametrize("source", ["data.yaml", "labels"])
def test_labels_of_yolo_are_found_in_another_case_and_counted_without_an_image(tmp_path, source):
    draw_images(tmp_path / "images", "A.jpg", "B.jpg", "C.jpg", "other.jpg")
    for name in ("A.txt", "b.txt", "C.TXT", "d.txt", "E.TXT", "other.txt"):
        write(tmp_path / "labels" / name, "0 0.5 0.5 0.5 0.5\n")
    for name, text in {"README.txt": "cat\n", "classes.txt": "cat\n", "._A.txt": "cat\n", "empty.txt": ""}.items():
        write(tmp_path / "labels" / name, text)
    write(tmp_path / "train.txt", "".join(f"images/{name}.jpg\n" for name in "ABC"))
    write(tmp_path / "data.yaml", "train: train.txt\nnames: [cat]\n")
    data = read_annotations(tmp_path / source)
    names = ["A.jpg", "B.jpg", "C.jpg", *["other.jpg"] * (source == "labels")]
    assert [name.removeprefix("images/") for name, _, _ in boxes(data)] == names
    assert data.left_out == {"label files without an image": ["E.TXT", "d.txt", "empty.txt"]}


def test_yolo_lists_with_paths_of_another_machine_are_resolved(tmp_path):
    draw_images(tmp_path / "images", "train/a.jpg", "val/a.jpg")
    for split in ("train", "val"):
        write(tmp_path / f"labels/{split}/a.txt", "0 0.5 0.5 0.5 0.5\n")
        write(tmp_path / f"{split}.txt", f"/home/other/cells/images/{split}/a.jpg\n")
    write(tmp_path / "data.yaml", "names: [cell]\ntrain: train.txt\nval: val.txt\n")
    data = read_annotations(tmp_path / "data.yaml")
    names = {split: data.images[ids[0] - 1]["file_name"] for split, ids in data.splits.items()}
    assert names == {"train": "images/train/a.jpg", "val": "images/val/a.jpg"}


def test_yolo_is_read_from_one_folder_without_class_names(tmp_path):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "a.txt", "2 0.5 0.5 0.1 0.1\n2 0.5 0.5 0.1 0.1\n")
    data = read_annotations(tmp_path)
    assert boxes(data) == [("a.jpg", "class_2", [18, 9, 4, 2])]
    assert data.left_out == {"duplicate lines": ["a.txt line 2"]}
    assert "data.yaml" in data.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 10 20 30 40", "not a fraction of the image. Are these pixels"),
        ("0 0.1 0.1 0.1", "got 3 numbers after the class"),
        ("0 0.1 0.1 -0.1 0.1", "a size is negative"),
        ("7 0.1 0.1 0.1 0.1", "no class is numbered 7"),
        ("cat 0.1 0.1 0.1 0.1", "expected a class number"),
        ("0 0.1 nan 0.1 0.1", "expected `CLASS CX CY W H`"),
    ],
)
def test_wrong_line_of_yolo_is_named(tmp_path, line, message):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "classes.txt", "cat\n")
    write(tmp_path / "a.txt", f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(DataError, match=message) as error:
        read_annotations(tmp_path, format="yolo")
    assert "a.txt' line 2" in str(error.value)


def test_voc_counts_pixels_from_one_and_keeps_its_flags(tmp_path):
    draw_images(tmp_path / "JPEGImages", "a.jpg", "unlabeled.jpg")
    voc(tmp_path / "Annotations", "a", ("dog", 1, 1, 10, 5), ("cat", 3, 2, 3, 2))
    voc(tmp_path / "Annotations", "lost", ("dog", 1, 1, 2, 2))
    data = read_annotations(tmp_path)
    assert boxes(data) == [("a.jpg", "dog", [0, 0, 10, 5]), ("a.jpg", "cat", [2, 1, 1, 1])]
    assert [category["name"] for category in data.categories] == ["cat", "dog"]
    assert data.annotations[0]["difficult"] == 1
    assert [note for note in data.notes if "`difficult`" in note and note.endswith(": 2")]
    assert data.left_out == {
        "XML files without an image": ["lost.xml"],
        "images without an XML file": ["unlabeled.jpg"],
    }


def test_version_number_in_a_name_is_not_taken_for_an_extension(tmp_path):
    draw_images(tmp_path, "img.jpg", "other.v2.jpg")
    voc(tmp_path, "img.v1", ("cell", 1, 1, 20, 10))
    voc(tmp_path, "other.v2", ("cell", 1, 1, 20, 10))
    data = read_annotations(tmp_path)
    assert [image["file_name"] for image in data.images] == ["other.v2.jpg"]
    assert data.left_out["XML files without an image"] == ["img.v1.xml"]


def test_voc_with_a_zero_coordinate_counts_from_zero(tmp_path):
    draw_images(tmp_path, "a.jpg")
    voc(tmp_path, "a", ("dog", 0, 1, 10, 5))
    data = read_annotations(tmp_path)
    assert boxes(data) == [("a.jpg", "dog", [0, 1, 10, 4])] and "begin at 0" in data.notes[0]


def test_fractions_in_voc_are_multiplied_and_do_not_count_from_one(tmp_path):
    draw_images(tmp_path, "a.jpg", "b.jpg")
    voc(tmp_path, "a", ("cat", 0.1, 0.1, 0.4, 0.3))
    voc(tmp_path, "b", ("cat", 0, 0.0625, 1, 1.001))
    data = read_annotations(tmp_path)
    assert boxes(data) == [("a.jpg", "cat", [4, 2, 12, 4]), ("b.jpg", "cat", [0, 1.25, 40, 18.77])]
    assert data.notes[0] == "no number is above 1, apart from rounding: the boxes are fractions of their image"


def test_xml_with_entities_is_refused(tmp_path):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><annotation><filename>&b;</filename></annotation>')
    with pytest.raises(DataError, match="declares a document type"):
        read_annotations(tmp_path, format="voc")


def test_labelme_groups_shapes_and_decodes_masks(tmp_path):
    draw_images(tmp_path, "a.jpg")
    buffer = io.BytesIO()
    Image.fromarray(np.full((3, 4), 255, np.uint8)).save(buffer, format="PNG")
    shapes = [
        {"label": "dog", "points": [[12, 4], [2, 9]], "shape_type": "rectangle", "group_id": None},
        {"label": "cat", "points": [[0, 0], [4, 0], [4, 4]], "shape_type": "polygon", "group_id": 1},
        {"label": "cat", "points": [[10, 0], [14, 0], [14, 4]], "shape_type": "polygon", "group_id": 1},
        {"label": "cat", "points": [[5, 6], [8, 8]], "shape_type": "mask",
         "mask": base64.b64encode(buffer.getvalue()).decode()},
        {"label": "cat", "points": [[1, 1]], "shape_type": "point"},
    ]  # fmt: skip
    content = {"imagePath": "a.jpg", "imageWidth": 40, "imageHeight": 20, "shapes": shapes}
    write(tmp_path / "a.json", json.dumps(content))
    data = read_annotations(tmp_path)
    assert data.format == "labelme"
    assert sorted(boxes(data)) == [
        ("a.jpg", "cat", [0, 0, 14, 4]),
        ("a.jpg", "cat", [5, 6, 4, 3]),
        ("a.jpg", "dog", [2, 4, 10, 5]),
    ]
    assert data.left_out == {"shapes of type point": ["a.json shape 5"]}


def test_cvat_boxes_polygons_masks_and_subsets_are_read(tmp_path):
    draw_images(tmp_path, "images/a.jpg")
    write(
        tmp_path / "annotations.xml",
        "<annotations><meta><task><labels><label><name>cat</name></label></labels></task></meta>"
        '<image id="0" name="a.jpg" width="40" height="20" subset="Train">'
        '<box label="cat" occluded="1" xtl="1" ytl="2" xbr="11" ybr="5"/>'
        '<polygon label="cat" points="0,0;4,0;4,4"/>'
        '<mask label="cat" rle="1,2,1" left="10" top="3" width="2" height="2"/>'
        '<box label="cat" rotation="90" xtl="10" ytl="8" xbr="20" ybr="12"/>'
        '<points label="cat" points="1,1"/></image></annotations>',
    )
    data = read_annotations(tmp_path / "annotations.xml")
    found = [box for _, _, box in boxes(data)]
    assert found == [[1, 2, 10, 3], [0, 0, 4, 4], [10, 3, 2, 2], [13, 5, 4, 10]]
    mask = decode_segmentation(data.annotations[2]["segmentation"], 20, 40)
    assert mask[3:5, 10:12].tolist() == [[0, 1], [1, 0]] and mask.sum() == 2
    assert data.splits == {"train": [1]} and list(data.left_out) == ["shapes of type points"]


def test_images_of_a_cvat_project_have_a_folder_for_each_subset(tmp_path):
    draw_images(tmp_path, *(f"images/{name}" for name in ("Train/a.jpg", "Batch 2/a.jpg", "b.jpg")))
    listed = (("a.jpg", "Train", 1), ("a.jpg", "Batch 2", 2), ("b.jpg", "Train", 3))
    images = (
        f'<image id="{x}" name="{name}" width="40" height="20" subset="{subset}">'
        f'<box label="cat" xtl="{x}" ytl="2" xbr="11" ybr="5"/></image>'
        for name, subset, x in listed
    )
    labels = "<meta><task><labels><label><name>cat</name></label></labels></task></meta>"
    path = write(tmp_path / "annotations.xml", f"<annotations>{labels}{''.join(images)}</annotations>")
    data = read_annotations(path)
    assert [(image["file_name"], objects[0]["bbox"][0]) for image, objects in data.each_image()] == [
        ("Train/a.jpg", 1), ("Batch 2/a.jpg", 2), ("b.jpg", 3),
    ]  # fmt: skip
    assert data.splits == {"train": [1, 3]} and data.recordings == {2: "subset Batch 2"}


@pytest.mark.parametrize(
    "text",
    [
        "filename,width,height,class,xmin,ymin,xmax,ymax\na.jpg,40,20,cat,10,5,30,15\n",
        "image;label;x;y;w;h\nimages/a.jpg;cat;10;5;20;10\n",
        "a.jpg,10,5,30,15,cat\n",
        "ImageID,LabelName,XMin,YMin,XMax,YMax\na,cat,0.25,0.25,0.75,0.75\n",
    ],
)
def test_csv_columns_are_recognized(tmp_path, text):
    draw_images(tmp_path, "a.jpg")
    data = read_annotations(write(tmp_path / "boxes.csv", text))
    assert boxes(data) == [("a.jpg", "cat", [10, 5, 20, 10])]


@pytest.mark.parametrize(("first", "scale"), [(1, (1, 1)), (0, (1, 1)), (1, (40, 20))])
def test_corners_of_quadrilaterals_in_csv_are_polygons(tmp_path, first, scale):
    draw_images(tmp_path, "a.jpg", "b.jpg")
    polygons = {"a.jpg": [10, 5, 30, 5, 30, 15, 10, 15], "b.jpg": [10, 5, 30, 7, 28, 15, 8, 13]}
    columns = [f"{axis}{k}" for k in range(first, first + 4) for axis in "xy"]
    rows = [[name, *(value / scale[k % 2] for k, value in enumerate(p)), "cat"] for name, p in polygons.items()]
    text = "\n".join(",".join(map(str, row)) for row in (["filename", *columns, "class"], *rows))
    data = read_annotations(write(tmp_path / "boxes.csv", text))
    assert boxes(data) == [("a.jpg", "cat", [10, 5, 20, 10]), ("b.jpg", "cat", [8, 5, 22, 10])]
    assert [annotation["segmentation"] for annotation in data.annotations] == [[p] for p in polygons.values()]


@pytest.mark.parametrize("form", ['"[6.0, 8, 24, 10.0]"', "6 8 24 10", '"(6, 8, 24, 10)"', "[ 6.  8. 24. 10.]"])
def test_a_column_that_holds_the_whole_box_is_read(tmp_path, form):
    draw_images(tmp_path / "train", "0.png", "1.png")
    text = f"image_id,width,height,bbox,source\n0,40,20,{form},farm\n1,40,20,[],farm\n"
    data = read_annotations(write(tmp_path / "train.csv", text), tmp_path / "train")
    assert boxes(data) == [("0.png", "object", [6, 8, 24, 10])] and len(data.images) == 2
    assert "the column 'bbox' is read as [x, y, width, height]" in data.notes
    data = read_annotations(write(tmp_path / "train.csv", text.replace("source", "label")), tmp_path / "train")
    assert boxes(data) == [("0.png", "farm", [6, 8, 24, 10])]
    corners = write(
        tmp_path / "train.csv", 'file,label,bbox\n0.png,cat,"[6, 8, 35, 18]"\n1.png,cat,"[20, 8, 35, 18]"\n'
    )
    with pytest.raises(DataError, match="by which 2 of 2 boxes reach out of their images. If they are corners"):
        read_annotations(corners, tmp_path / "train")
    with pytest.raises(DataError, match="train.csv line 2: the box is '6,8,24'; expected 4 numbers"):
        read_annotations(write(corners, 'file,label,bbox\n0.png,cat,"[6, 8, 24]"\n'), tmp_path / "train")


def test_tables_in_the_folders_of_splits_are_read(tmp_path):
    for folder, names in (("train", ("a.jpg", "b.jpg")), ("valid", ("a.jpg",)), ("test", ("c.jpg",))):
        draw_images(tmp_path / folder, *names)
        rows = "".join(f"{name},40,20,mug,6,{len(folder)},30,16\n" for name in names)
        write(tmp_path / folder / "_annotations.csv", f"filename,width,height,class,xmin,ymin,xmax,ymax\n{rows}")
    data = read_annotations(tmp_path)
    assert data.format == "csv" and {name: len(ids) for name, ids in data.splits.items()} == {
        "train": 2,
        "val": 1,
        "test": 1,
    }
    assert sorted(boxes(data)) == [
        ("test/c.jpg", "mug", [6, 4, 24, 12]),
        ("train/a.jpg", "mug", [6, 5, 24, 11]),
        ("train/b.jpg", "mug", [6, 5, 24, 11]),
        ("valid/a.jpg", "mug", [6, 5, 24, 11]),
    ]
    (tmp_path / "test").rename(tmp_path / "more")
    with pytest.raises(
        DataError, match=r"3 files \*.csv in its folders \(more/_annotations.csv, .*or one in each of the"
    ):
        read_annotations(tmp_path)


@pytest.mark.parametrize("photos", [("valid/2.jpg",), ()])
def test_missing_photos_of_a_split_are_not_those_of_another_one(tmp_path, photos):
    draw_images(tmp_path, *(f"train/{k}.jpg" for k in range(3)), *photos)
    for folder, x in (("train", 1), ("valid", 5)):
        rows = "".join(f"{k}.jpg,cat,{x},2,{x + 9},12\n" for k in range(3))
        write(tmp_path / folder / "_annotations.csv", f"filename,class,xmin,ymin,xmax,ymax\n{rows}")
    data = read_annotations(tmp_path)
    assert {name: bbox[0] for name, _, bbox in boxes(data)} == {
        **{f"train/{k}.jpg": 1 for k in range(3)},
        **dict.fromkeys(photos, 5),
    }
    assert len(data.annotations) == 3 + len(photos) and not data.notes
    assert list(map(len, data.left_out.values())) == [3 - len(photos)]


def test_ambiguous_csv_columns_are_an_error(tmp_path):
    draw_images(tmp_path, "a.jpg")
    path = write(tmp_path / "b.csv", "file,class,xmin,ymin,xmax,ymax,x,y,w,h\na,cat,1,1,2,2,1,1,1,1\n")
    with pytest.raises(DataError, match=r"xmin,ymin,xmax,ymax \(xyxy\) or x,y,w,h \(xywh\)"):
        read_annotations(path, format="csv")


@pytest.mark.parametrize("value", [1, 255])
def test_objects_of_binary_masks_are_what_is_not_black(tmp_path, value):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks" / "b.png")
    values[2:6, 3:9], values[10:12, 20:30] = value, value
    Image.fromarray(values).save(tmp_path / "masks" / "a.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert boxes(data) == [("a.jpg", f"class_{value}", [3, 2, 6, 4]), ("a.jpg", f"class_{value}", [20, 10, 10, 2])]
    assert len(data.images) == 2 and "0 is the background, without objects: 97.2% of the pixels" in data.notes
    assert any("255 is a class" in note and "44 pixels (2.8%)" in note for note in data.notes) == (value == 255)
    write(tmp_path / "masks" / "classes.json", json.dumps({"0": "ground", str(value): "cell"}))
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert [name for _, name, _ in boxes(data)] == ["ground", "cell", "cell", "ground"]


@pytest.mark.parametrize("mode", ["LA", "RGB", "RGBA"])
def test_gray_in_several_channels_is_read_as_one(tmp_path, mode):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = 1, 2
    (tmp_path / "masks").mkdir()
    for name in "ab":
        Image.fromarray(values).convert(mode).save(tmp_path / "masks" / f"{name}.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    found = [("class_0", [0, 0, 40, 20]), ("class_1", [3, 2, 6, 4]), ("class_2", [20, 10, 10, 2])]
    assert [(name, box) for _, name, box in boxes(data)] == found * 2
    folders = {"images": tmp_path / "images", "labels": tmp_path / "masks"}
    dataset = SemanticFolder(**folders, classes=["ground", "road", "tree"])
    assert (dataset.load_semantic(0) == values).all()
    colored = np.asarray(Image.open(tmp_path / "masks" / "a.png").convert("RGB")).copy()
    colored[0, 0] = 1, 2, 3
    Image.fromarray(colored).save(tmp_path / "masks" / "a.png")
    with pytest.raises(DataError, match="mode RGB .* expected one channel"):
        dataset.load_semantic(0)
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")  # one rule for all of them
    assert {name for file, name, _ in boxes(data) if file == "b.jpg"} == {"class_0", "class_65793", "class_131586"}


@pytest.mark.parametrize("gray", [0, 255])
def test_label_image_that_may_be_in_the_transparency_is_an_error(tmp_path, gray):
    draw_images(tmp_path / "images", "a.jpg")
    pixels = np.full((20, 40, 2), gray, np.uint8)
    pixels[..., 1] = 255
    pixels[2:6, 3:9, 1] = 0
    (tmp_path / "masks").mkdir()
    Image.fromarray(pixels, "LA").save(tmp_path / "masks" / "a.png")
    dataset = SemanticFolder(tmp_path / "images", tmp_path / "masks", classes=["ground", "road"])
    with pytest.raises(DataError, match="a gray image of mode LA that is transparent in parts: its classes may be its"):
        dataset.load_semantic(0)


def test_label_images_give_instances_and_classes(tmp_path):
    draw_images(tmp_path / "images", "a.jpg", "b.jpg")
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = 1, 2
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks" / "a_mask.png")
    with pytest.raises(DataError, match="format=semantic_maps or format=instance_maps"):
        detect_format(tmp_path / "masks", tmp_path / "images")
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="instance_maps")
    assert boxes(data) == [("a.jpg", "object", [3, 2, 6, 4]), ("a.jpg", "object", [20, 10, 10, 2])]
    assert data.left_out == {"images without a label image": ["b.jpg"]}
    data = read_annotations(tmp_path / "masks", tmp_path / "images", format="semantic_maps")
    assert [name for _, name, _ in boxes(data)] == ["class_0", "class_1", "class_2"]
    write(tmp_path / "masks" / "classes.txt", "\ufeffground\nroad\ntree\n")  # as Windows begins UTF-8
    data = read_annotations(tmp_path / "masks", tmp_path / "images")
    assert data.format == "semantic_maps" and [name for _, name, _ in boxes(data)] == ["ground", "road", "tree"]
    Image.fromarray(values.astype(np.uint16) * 1000 + values).save(tmp_path / "masks" / "a_mask.png")
    data = read_annotations(tmp_path / "masks", tmp_path / "images")
    assert [name for _, name, _ in boxes(data)] == ["road", "tree"]


def write_map(folder, name, values):
    """A label image and its photo."""
    draw_images(folder / "images", f"{name}.jpg", size=values.shape[1::-1])
    (folder / "maps").mkdir(exist_ok=True)
    Image.fromarray(values).save(folder / "maps" / f"{name}.png")


def test_numbers_of_more_than_999_instances_are_not_taken_for_classes(tmp_path):
    for name, count in (("a", 300), ("b", 1100)):
        values = np.zeros(2400, np.uint16)
        values[: 2 * count] = np.repeat(np.arange(1, count + 1), 2)
        write_map(tmp_path, name, values.reshape(40, 60))
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert Counter((file, name) for file, name, _ in boxes(data)) == {
        ("a.jpg", "object"): 300,
        ("b.jpg", "object"): 1100,
    }


def test_one_instance_with_a_class_decides_for_the_folder(tmp_path):
    values = np.full((20, 40), 7, np.uint16)
    write_map(tmp_path, "a", values)
    values[2:6, 3:9] = 26_000
    write_map(tmp_path, "b", values)
    (tmp_path / "maps" / "0.png").write_text("not an image")
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert boxes(data) == [("b.jpg", "class_26", [3, 2, 6, 4])]
    assert "values below 1000 are classes without instances, left out: 98.5% of the pixels" in data.notes


@pytest.mark.parametrize("colored", [False, True])
def test_class_file_is_not_used_for_instances_without_a_class(tmp_path, colored):
    values = np.zeros((20, 40, 3) if colored else (20, 40), np.uint8)
    values[2:6, 3:9], values[10:12, 20:30] = ((128, 0, 0), (0, 128, 0)) if colored else (1, 2)
    write_map(tmp_path, "a", values)
    path = write(tmp_path / "labelmap.txt", "background:0,0,0::\ncat:128,0,0::\n")
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert [category["name"] for category in data.categories] == ["object"] and len(data.annotations) == 2
    assert data.notes == [f"{path} is not used: values are objects without a class"]


@pytest.mark.parametrize(("others", "count"), [((1, 2), 2), ((253, 254), 3), ((85, 170), 3)])
def test_void_around_instances_is_not_an_object(tmp_path, others, count):
    values = np.zeros((20, 40), np.uint8)
    values[4:16, 9:31], values[5:15, 10:20], values[5:15, 20:30] = 255, *others
    write_map(tmp_path, "a", values)
    data = read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")
    assert len(data.annotations) == count
    assert ("255 is no object, left out: 8.0% of the pixels" in data.notes) == (count == 2)


@pytest.mark.parametrize("name", ["background", "_Background_"])
def test_class_called_background_has_no_objects(tmp_path, name):
    values = np.zeros((20, 40), np.uint8)
    values[2:6, 3:9] = 1
    write_map(tmp_path, "a", values)
    write(tmp_path / "maps" / "classes.txt", f"{name}\ncrack\nhole\n")
    data = read_annotations(tmp_path / "maps", tmp_path / "images")
    assert boxes(data) == [("a.jpg", "crack", [3, 2, 6, 4])]
    assert [category["name"] for category in data.categories] == ["crack", "hole"]
    assert "0 is the background, without objects: 97.0% of the pixels" in data.notes


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


@pytest.mark.parametrize("to", WRITERS)
def test_boxes_survive_every_format(tmp_path, to):
    draw_images(tmp_path / "photos", "x/a.jpg", "y/b.jpg", size=(333, 217))
    rng = np.random.default_rng(0)
    rows = []
    for name in ("x/a.jpg", "y/b.jpg"):
        for x, y, width, height in rng.integers(1, 100, (20, 4)).tolist():
            rows.append(f"{name},{x},{y},{x + width},{y + height + 0.5},{rng.choice(['cat', 'dog'])}")
    data = read_annotations(write(tmp_path / "photos" / "boxes.csv", "\n".join(rows)))
    data.splits = {"train": [1], "val": [2]}
    data.annotations[0]["occluded"] = True
    lost = {}
    WRITERS[to](data, tmp_path / "out", lost)
    again = read_annotations(tmp_path / "out", data.folder if to == "coco" else None)
    assert lost == {} and again.format == to and again.splits.keys() == {"train", "val"}
    assert [(name, box) for _, name, box in boxes(again)] == [(name, box) for _, name, box in boxes(data)]


@pytest.mark.parametrize(("value", "flag"), [(True, "1"), (2, "1"), ("1", "1"), (False, "0"), ("0", "0"), (None, "0")])
def test_flags_of_other_tools_are_written_as_those_of_voc(tmp_path, value, flag):
    draw_images(tmp_path, "a.jpg")
    data = read_annotations(write(tmp_path / "boxes.csv", "a.jpg,10,5,30,15,cat\n"))
    data.annotations[0]["occluded"] = value
    write_voc(data, tmp_path / "out", {})
    assert f"<occluded>{flag}</occluded>" in next((tmp_path / "out").rglob("*.xml")).read_text()


def test_masks_with_holes_and_several_parts_survive_as_one_outline():
    mask = np.zeros((60, 80), np.uint8)
    mask[5:40, 5:40], mask[15:25, 15:25], mask[45:55, 50:70] = 1, 0, 1
    runs = {"size": [60, 80], "counts": []}
    flat = mask.T.ravel()
    changes = np.flatnonzero(np.diff(flat)) + 1
    runs["counts"] = np.diff([0, *changes, flat.size]).tolist()
    outline = join_polygons(outlines(runs, 60, 80))
    again = decode_segmentation([outline], 60, 80)
    assert (again == mask).all()
    assert polygon_box([outline]) == [5, 5, 65, 50]


def test_supervision_library_reads_the_same_boxes(tmp_path):
    supervision = pytest.importorskip("supervision")
    draw_images(tmp_path / "photos", "a.png", size=(64, 48))
    data = read_annotations(write(tmp_path / "photos" / "b.csv", "a.png,10,5,30,15,cat\na.png,1,2,9,40,dog\n"))
    data.splits = {"train": [1]}
    WRITERS["yolo"](data, tmp_path / "yolo", {})
    WRITERS["voc"](data, tmp_path / "voc", {})
    read = supervision.DetectionDataset.from_yolo(
        str(tmp_path / "yolo/images/train"), str(tmp_path / "yolo/labels/train"), str(tmp_path / "yolo/data.yaml")
    )
    ((_, _, found),) = list(read)
    assert read.classes == ["cat", "dog"] and found.xyxy.tolist() == [[10, 5, 30, 15], [1, 2, 9, 40]]
    read = supervision.DetectionDataset.from_pascal_voc(
        str(tmp_path / "voc/JPEGImages"), str(tmp_path / "voc/Annotations")
    )
    ((_, _, found),) = list(read)
    assert found.xyxy.tolist() == [[10, 5, 30, 15], [1, 2, 9, 40]]


def test_missing_yolo_label_files_are_not_taken_for_empty_images(tmp_path):
    draw_images(tmp_path / "images", "a.png", "b.png")
    write(tmp_path / "annotations/a.txt", "0 0.5 0.5 0.1 0.1\n")
    write(tmp_path / "data.yaml", "train: images\nnames: [cat]\n")
    with pytest.raises(DataError, match="data.yaml: no image has a label file"):
        read_annotations(tmp_path / "data.yaml")


def test_yolo_reports_training_images_in_the_test_split(tmp_path):
    draw_images(tmp_path / "images", "train/a.png", "val/b.png")
    write(tmp_path / "labels/train/a.txt", "0 0.5 0.5 0.1 0.1\n")
    write(tmp_path / "data.yaml", "train: images/train\nval: images/val\ntest: images/train\nnames: [cat]\n")
    notes = read_annotations(tmp_path / "data.yaml").notes
    assert notes == ["1 image is in both train and test, such as images/train/a.png"]


def coco_with(folder, *boxes):
    draw_images(folder, "a.png")
    data = AnnotatedImages("coco", folder / "a.json", folder)
    image_id = data.add_image("a.png", 40, 20)
    for bbox in boxes:
        data.add_object(image_id, "cat", bbox)
    return data


def test_voc_boxes_beyond_the_border_do_not_shift_the_others(tmp_path):
    data, lost = coco_with(tmp_path, [-3, 2, 8, 4], [10, 5, 6, 6], [50, 2, 4, 4]), {}
    write_voc(data, tmp_path / "out", lost)
    again = read_annotations(tmp_path / "out")
    assert [annotation["bbox"] for annotation in again.annotations] == [[0, 2, 5, 4], [10, 5, 6, 6]]
    assert lost == {"parts of boxes outside their image": ["1"], "boxes outside their image": ["3"]}


@pytest.mark.parametrize("to", ["yolo", "voc"])
def test_images_that_would_share_a_label_file_are_named(tmp_path, to):
    data = coco_with(tmp_path, [10, 5, 6, 6])
    draw_images(tmp_path, "a.bmp")
    data.add_image("a.bmp", 40, 20)
    with pytest.raises(DataError, match="'a.bmp' and 'a.png' would have one label file"):
        WRITERS[to](data, tmp_path / "out", {})


LISTED = ("mon/1", "mon/2", "tue/1", "tue/2")


def write_listed(folder, kind, names):
    """Write annotations of images, with a box of an own place for each."""
    boxes_of = {name: (k, 0, k + 10, 10) for k, name in enumerate(names, start=1)}
    if kind == "voc":
        for name, corners in boxes_of.items():
            voc(folder / "source" / name.partition("/")[0], name.partition("/")[2], ("cat", *corners))
        return folder / "source"
    if kind == "labelme":
        for name, (x0, y0, x1, y1) in boxes_of.items():
            shape = {"label": "cat", "shape_type": "rectangle", "points": [[x0, y0], [x1, y1]]}
            content = {"shapes": [shape], "imagePath": f"{name[-1]}.jpg", "imageWidth": 40, "imageHeight": 20}
            write(folder / f"source/{name}.json", json.dumps(content))
        return folder / "source"
    if kind == "csv":
        rows = [f"{name}.jpg,{','.join(map(str, corners))},cat" for name, corners in boxes_of.items()]
        return write(folder / "source.csv", "\n".join(["file,xmin,ymin,xmax,ymax,class", *rows]))
    if kind == "cvat":
        box = '<box label="cat" xtl="{}" ytl="{}" xbr="{}" ybr="{}"/>'
        images = [
            f'<image name="{name}.jpg" width="40" height="20">{box.format(*corners)}</image>'
            for name, corners in boxes_of.items()
        ]
        return write(folder / "source.xml", f"<annotations>{''.join(images)}</annotations>")
    tasks = []
    for name, (x0, y0, x1, y1) in boxes_of.items():
        value = {"x": x0 / 0.4, "y": y0 / 0.2, "width": (x1 - x0) / 0.4, "height": (y1 - y0) / 0.2, "rotation": 0}
        result = {"type": "rectanglelabels", "original_width": 40, "value": {**value, "rectanglelabels": ["cat"]}}
        tasks.append({"id": 1, "data": {"image": f"{name}.jpg"}, "annotations": [{"result": [result]}]})
    return write(folder / "source.json", json.dumps(tasks))


@pytest.mark.parametrize("kind", ["voc", "labelme", "csv", "cvat", "label_studio"])
@pytest.mark.parametrize("present", ["mon", "tue"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_missing_image_is_not_replaced_by_one_of_its_name_in_another_folder(tmp_path, kind, present, inside):
    draw_images(tmp_path / "images", f"{present}/1.jpg", f"{present}/2.jpg")
    images = tmp_path / "images" / (present if inside else ".")  # the folder that is given may be the innermost one
    data = read_annotations(write_listed(tmp_path, kind, LISTED), images)
    assert len(data.images) == 2 and [image["file_name"].rpartition("/")[2] for image in data.images] == [
        "1.jpg",
        "2.jpg",
    ]
    assert [box[0] for _, _, box in boxes(data)] == ([1, 2] if present == "mon" else [3, 4])
    assert sum(map(len, data.left_out.values())) == 2


@pytest.mark.parametrize("kind", ["voc", "csv", "cvat", "label_studio"])
def test_two_paths_that_name_one_image_equally_well_are_an_error(tmp_path, kind):
    draw_images(tmp_path / "images", "1.jpg")
    with pytest.raises(DataError, match=r"'mon/1.*' and 'tue/1.*' both name '.*1\.jpg', the only image of that name"):
        read_annotations(write_listed(tmp_path, kind, ["mon/1", "tue/1"]), tmp_path / "images")


def test_images_are_found_by_names_of_another_case_if_there_are_none_of_this_one(tmp_path):
    draw_images(tmp_path / "images", "IMG_1.JPG", "Mon/a.jpg", "b.jpg", "B.JPG")
    data = read_annotations(write_listed(tmp_path, "csv", ["img_1", "mon/A", "b"]), tmp_path / "images")
    assert [image["file_name"] for image in data.images] == ["IMG_1.JPG", "Mon/a.jpg", "b.jpg"]


def test_text_file_of_two_images_is_an_error(tmp_path):
    draw_images(tmp_path / "images", "dogs/1.jpg", "others/1.jpg")
    write(tmp_path / "labels/1.txt", "0 0.5 0.5 0.2 0.2")
    with pytest.raises(DataError, match=r"1\.txt' is the only text file of two images, dogs/1\.jpg and others/1\.jpg"):
        read_annotations(tmp_path / "labels", tmp_path / "images")


@pytest.mark.parametrize("suffixes", [("_mask", "_mask_1"), ("_color", "_instanceIds", "_labelIds")])
def test_two_label_images_of_one_image_are_an_error(tmp_path, suffixes):
    draw_images(tmp_path / "images", "a.jpg")
    draw_images(tmp_path / "maps", *(f"a{suffix}.png" for suffix in suffixes))
    with pytest.raises(DataError, match=rf"a{suffixes[0]}\.png and a{suffixes[1]}\.png are both of the image a\.jpg"):
        read_annotations(tmp_path / "maps", tmp_path / "images", format="instance_maps")


def test_groups_of_open_images_are_crowds(tmp_path):
    draw_images(tmp_path, "a.jpg")
    rows = ["a,Cat,0.1,0.5,0.1,0.5,0", "a,Cat,0.5,0.9,0.5,0.9,1"]
    write(tmp_path / "boxes.csv", "\n".join(["ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf", *rows]))
    data = read_annotations(tmp_path / "boxes.csv")
    assert [annotation["iscrowd"] for annotation in data.annotations] == [0, 1]


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
