"""Annotations that are wrong on purpose: each is an error of one line, at once, that names the file."""

import json
import re
import time

import numpy as np
import pytest
from PIL import Image

from vitkit.data.formats import detect_format, read_annotations
from vitkit.data.formats.class_files import parse_class_file
from vitkit.errors import DataError

BOX = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}
NUMBER_OF_5000_DIGITS = "9" * 5000


@pytest.fixture
def folder(tmp_path):
    """A folder with one image of 40x32 pixels."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 32)).save(tmp_path / "images" / "a.png")
    return tmp_path


def refused(folder, name, text, *, images=True):
    """Return the error for a file with this content."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    source = path.parent if name.endswith(".txt") else path
    began = time.process_time()
    with pytest.raises(DataError) as raised:
        read_annotations(source, folder / "images" if images else None, format="yolo" if source != path else None)
    assert time.process_time() - began < 10
    assert "\n" not in str(raised.value)
    return str(raised.value)


def coco(**changes):
    return json.dumps(
        {
            "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 32}],
            "annotations": [BOX | changes],
            "categories": [{"id": 1, "name": "cell"}],
        }
    )


@pytest.mark.parametrize(
    "segmentation",
    [
        [[0, 0, 3e9, 0, 0, 3e9]], [[0, 0, 1]], [[0, 0, 1, 1]], "x", 5, [5], [[None] * 6], {"size": [32, 40]},
        {"size": [2**31, 2**31], "counts": [2**62]}, {"size": [40, 32], "counts": [1280]},
        {"size": [32, 40], "counts": [1279]}, {"size": [32, 40], "counts": "PPYo"}, {"size": [32, 40], "counts": 5},
    ],
)  # fmt: skip
def test_segmentations_are_checked_before_they_are_decoded(folder, segmentation):
    assert "a.json: annotation 1 (image 'a.png') has segmentation" in refused(
        folder, "a.json", coco(segmentation=segmentation)
    )


YAML = "train: images\nval: images\nnames: [cell]\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML + BOMB, "has aliases"),
        (YAML + "x: " + "[" * 3000 + "]" * 3000, "as YAML"),
        (YAML + "x: " + "[" * 200 + "]" * 200, "nested more than 100 levels"),
        (YAML + "x: " + "a" * (1 << 20), "has more than 1048576 bytes"),
        (YAML + "kpt_shape: 17", "kpt_shape is '17'"),
        (YAML + "kpt_shape: [.inf]", "kpt_shape is"),
        ('train: "images\\0"\nnames: [cell]', "train is"),
        ("train: {a: b}\nnames: [cell]", "train is"),
        ("train: images\nnames: {.inf: cell}", "a key is '.inf'"),
        ("train: images\nnames: {a: cell}", "a key is 'a'"),
        ("train: images\nnames: {-1: cell}", "a key is '-1'"),
        ("train: images\nnames: [[cell]]", "0 is ['cell']"),
        ('train: images\nnames: ["a\\nb"]', "expected the name of a class"),
        ("train: images\nnames: [cell, cell]", "two classes are called 'cell'"),
    ],
)
def test_yaml_is_checked(folder, text, message):
    assert message in refused(folder, "data.yaml", text, images=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0.5 0.5 1e300 0.1", "not a fraction"),
        ("0 nan 0.5 0.1 0.1", "numbers after the class"),
        ("1e300 0.5 0.5 0.1 0.1", "numbers after the class"),
        ("0 " + "1e300 " * 6, "not a fraction"),
        ("0 0.1 0.1 0.2 0.2 0.1 9", "9 is not a fraction"),
        ("0 0.1 0.1 0.2 0.1 1e300 1e300", "1e+300 is not a fraction"),
        ("".join(f"0 0.5 0.5 0.1 0.{k}\n" for k in range(200_000)), "200000 objects in one image"),
    ],
)
def test_lines_of_yolo_are_checked(folder, text, message):
    assert message in refused(folder, "labels/a.txt", text)


def test_long_line_is_sniffed_in_little_time_and_memory(folder):
    (folder / "labels").mkdir()
    (folder / "labels/a.txt").write_text("0 " + "0.5 " * 5_000_000)
    began = time.process_time()
    assert detect_format(folder / "labels", folder / "images") == "yolo"
    assert time.process_time() - began < 1


def voc(box="<xmin>1</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>", name="cell", size="40"):
    return (
        f"<annotation><filename>a.png</filename><size><width>{size}</width><height>32</height></size>"
        f"<object><name>{name}</name><bndbox>{box}</bndbox></object></annotation>"
    )


ENTITIES = '<!DOCTYPE a [<!ENTITY b "bbbb">]>' + voc()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTITIES, "declares a document type"),
        (ENTITIES.encode("utf-16"), "declares a document type"),
        ("<annotation>" + "<a>" * 5000 + "</a>" * 5000 + "</annotation>", "nested more than 100 levels"),
        (voc()[:-5], "as XML"),
        (voc("<xmin>1e300</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"), "bndbox/xmin is '1e300'"),
        (voc("<xmin>nan</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"), "bndbox/xmin is 'nan'"),
        (voc(f"<xmin>{NUMBER_OF_5000_DIGITS}</xmin><ymin>1</ymin><xmax>5</xmax><ymax>5</ymax>"), "bndbox/xmin is"),
        (voc(name="a&#10;b"), "expected the name of a class"),
        (voc(name="a" * 2000), "expected the name of a class"),
        (voc(size="1e9"), "width 1000000000"),
    ],
)
def test_voc_is_checked(folder, text, message):
    assert message in refused(folder, "a.xml", text)


def cvat(shape, size='width="40" height="32"'):
    return f'<annotations><image name="a.png" {size}>{shape}</image></annotations>'


MASK = '<mask label="cell" left="0" top="0" width="{w}" height="{h}" rle="{r}"/>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (cvat('<ellipse label="cell" cx="5" cy="5" rx="1" ry="1e200"/>'), "ry of ellipse is '1e200'"),
        (cvat('<polygon label="cell" points="1,2;3,4;x,5"/>'), "is 'x'"),
        (cvat('<box label="cell" xtl="1" ytl="1" xbr="inf" ybr="5"/>'), "xbr of box is 'inf'"),
        (cvat(MASK.format(w=4, h=4, r="15")), "does not fill its rectangle"),
        (cvat(MASK.format(w=4, h=4, r=NUMBER_OF_5000_DIGITS)), "does not fill its rectangle"),
        (
            cvat(MASK.format(w=4, h=4, r="16"), 'width="1000000" height="1000000"'),
            "listed as 1000000x1000000 pixels and has a mask",
        ),
        (cvat("<box/>" * 20_001), "20001 objects in one image"),
        (cvat("", 'width="1e9" height="1"'), "1000000000x1 pixels"),
    ],
)
def test_cvat_is_checked(folder, text, message):
    assert message in refused(folder, "a.xml", text)


def labelme(size=(40, 32), **shape):
    shape = {"label": "cell", "points": [[1, 1], [5, 5]], "shape_type": "rectangle"} | shape
    return json.dumps({"imagePath": "a.png", "imageWidth": size[0], "imageHeight": size[1], "shapes": [shape]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (labelme(points=[[1, 1], [9e18, 5]]), "x is 9e+18"),
        (labelme(points=[[1, 1], [5, float("nan")]]), "y is nan"),
        (labelme(points="abc"), "has points"),
        (labelme(label="a" * 1_000_000), "its label is"),
        (labelme(label="a\nb"), "its label is 'a\\nb'"),
        (labelme(shape_type="mask", mask="x"), "its mask is not a PNG"),
        (
            labelme(size=(1 << 20, 1 << 20)),
            "is 40x32 pixels (width x height, upright) and annotated as 1048576x1048576",
        ),
    ],
)
def test_labelme_is_checked(folder, text, message):
    assert message in refused(folder, "a.json", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,xmin,xmin,xmax,ymax,ymin,class\na.png,1,1,5,5,1,cell", "two columns are called 'xmin'"),
        ("file,xmin,ymin,xmax,ymax,class\na.png,1,1,5,5,cell\na.png,0.1,0.1,0.5,0.5,cell", "line 3: .* are fractions"),
        ("file,xmin,ymin,xmax,ymax,class\na.png,1,1,1e300,5,cell", "is '1e300'"),
        ('file,xmin,ymin,xmax,ymax,class\na.png,1,1,5,5,"a\nb"', "expected the name of a class"),
    ],
)
def test_csv_is_checked(folder, text, message):
    assert re.search(message, refused(folder, "a.csv", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"abc"', "contains 'abc'"),
        ("[1, 2]", "contains 1"),
        ('["a", "a"]', "two classes are called 'a'"),
        ('{"0": ["a"]}', "expected the name of a class"),
        ('{"x": "a"}', "a number is 'x'"),
        ('[{"id": 0, "name": "a", "color": [-1, 0, 0]}]', "the color of 'a' is \\[-1, 0, 0\\]"),
        ('[{"id": 0, "name": "a", "color": [1, 2]}]', "the color of 'a'"),
        ('[{"id": 0, "name": "a"}, {"id": 0, "name": "b"}]', "two classes have the number 0"),
        ('{"classes": ["a"], "ignore_index": "x"}', "a number as ignore_index"),
    ],
)
def test_class_files_are_checked(tmp_path, text, message):
    path = tmp_path / "classes.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as raised:
        parse_class_file(path)
    assert "\n" not in str(raised.value)


def test_objects_outside_their_image_are_noted(folder):
    (folder / "a.json").write_text(coco(bbox=[50, 1, 5, 5]))
    assert read_annotations(folder / "a.json", folder / "images").notes == [
        "1 object lies outside its image: annotation 1 of 'a.png'"
    ]


def test_name_of_60000_folders_is_found_in_little_time(folder):
    content = json.loads(coco())
    content["images"][0]["file_name"] = "b/" * 60_000 + "a.png"
    assert "file_name" in refused(folder, "a.json", json.dumps(content))
    (folder / "a.xml").write_text(voc().replace("a.png", "b/" * 60_000 + "a.png"))
    began = time.process_time()
    read_annotations(folder / "a.xml", folder / "images")
    assert time.process_time() - began < 5


def test_yaml_is_read_as_the_texts_that_it_contains(folder):
    names = ["yes", "no", "12", "1.50", "2001-13-45", "1e3"]
    more = f'x: {NUMBER_OF_5000_DIGITS}\n? !!int "y"\n: 1\ntest: null\nkpt_shape: [2, 3]\n'
    (folder / "images" / "a.txt").write_text("1 0.5 0.5 0.1 0.1\n")
    (folder / "data.yaml").write_text(f"train: images\nnames: [{', '.join(names)}]\n{more}")
    data = read_annotations(folder / "data.yaml")
    assert [category["name"] for category in data.categories] == names
    assert list(data.splits) == ["train"] and len(data.annotations) == 1


def test_damaged_data_yaml_beside_labels_is_an_error(folder):
    (folder / "data.yaml").write_text("train: images\nnames: [cell\n")
    assert "data.yaml' as YAML" in refused(folder, "labels/a.txt", "0 0.5 0.5 0.1 0.1\n")


@pytest.mark.parametrize(
    ("kind", "message"), [("instance_maps", "20001 objects in one image"), ("semantic_maps", "40000 different values")]
)
def test_label_image_of_noise_is_refused(folder, kind, message):
    Image.new("RGB", (200, 200)).save(folder / "images" / "a.png")
    (folder / "labels").mkdir()
    Image.fromarray(np.arange(1000, 41_000, dtype=np.uint16).reshape(200, 200)).save(folder / "labels" / "a.png")
    with pytest.raises(DataError, match=message):
        read_annotations(folder / "labels", folder / "images", format=kind)


@pytest.mark.parametrize(
    ("size", "segmentation", "message"),
    [
        ((1000, 1000), [[9999, 0, 0, 1] * 5000], "outlines are at most 4194304 pixels long"),
        ((60_000, 60_000), {"size": [60_000, 60_000], "counts": [3_600_000_000]}, "60000x60000 pixels and has run"),
    ],
)
def test_masks_that_would_fill_the_memory_are_refused(folder, size, segmentation, message):
    image = {"id": 1, "file_name": "a.png", "width": size[0], "height": size[1]}
    content = json.loads(coco(segmentation=segmentation)) | {"images": [image]}
    (folder / "images" / "a.png").unlink()  # the file's size would be an error before
    Image.new("RGB", (8, 8)).save(folder / "images" / "b.png")
    assert message in refused(folder, "a.json", json.dumps(content))


def test_polygon_outside_its_image_is_noted_although_its_box_is_inside(folder):
    (folder / "a.json").write_text(coco(segmentation=[[100, 100, 120, 100, 120, 110]]))
    assert "1 object lies outside its image" in read_annotations(folder / "a.json", folder / "images").notes[0]


def test_unicode_forms_of_a_class_name_are_one_class(folder):
    (folder / "a.csv").write_text("a.png,1,1,5,5,B\u00e4r\na.png,2,2,6,6,Ba\u0308r\n", encoding="utf-8")
    assert [c["name"] for c in read_annotations(folder / "a.csv", folder / "images").categories] == ["B\u00e4r"]


@pytest.mark.parametrize(("kind", "pattern"), [("cvat", "*.xml"), ("csv", "*.csv")])
def test_folder_needs_one_file_of_a_format_that_has_one(folder, kind, pattern):
    with pytest.raises(DataError, match=re.escape(f"has 0 files {pattern}; expected one")):
        read_annotations(folder, folder / "images", format=kind)
    for name in ("a", "b"):
        (folder / pattern.replace("*", name)).write_text("a.png,1,1,5,5,cell\n")
    with pytest.raises(DataError, match=re.escape(f"has 2 files {pattern} (a.")):
        read_annotations(folder, folder / "images", format=kind)


def test_blanks_around_class_names_are_reported(folder):
    path = folder / "a.csv"
    path.write_text("file,class,xmin,ymin,xmax,ymax\na.png, cell ,1,1,5,5\na.png, cell ,2,2,5,5\n")
    data = read_annotations(path, folder / "images")
    assert data.categories == [{"id": 1, "name": "cell"}]
    assert data.left_out == {"blanks around class names": ["' cell '"]}


def test_long_name_that_is_left_out_is_cut(folder):
    (folder / "a.csv").write_text(f"a.png,1,1,5,5,cell\n{'x' * 5000},1,1,5,5,cell\n")
    ((name,),) = read_annotations(folder / "a.csv", folder / "images").left_out.values()
    assert name.startswith("line 2 (xxx") and len(name) == 501


def test_dataset_without_a_readable_image_is_refused(folder):
    (folder / "images" / "a.png").write_text("not an image")
    message = refused(folder, "labels/a.txt", "0 0.5 0.5 0.1 0.1\n")
    assert "has no usable image below" in message and "left out 1 images whose file cannot be read, such as" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels/a.txt", "0 {} 0.5 0.1 0.1"),
        ("a.csv", "a.png,1,1,{},5,cell\na.png,1,1,{},5,cell"),
        ("b.csv", "file,class,xmin,ymin,{},ymax\na.png,cell,1,1,5,5"),
        ("c.csv", "file,class,{},{},xmin,ymin,xmax,ymax\na.png,cell,1,1,1,1,5,5"),
    ],
)
def test_long_values_are_cut_in_messages(folder, name, text):
    assert len(refused(folder, name, text.replace("{}", "x" * 5000)).replace(str(folder), "")) < 700


def test_equal_names_in_coco_are_noted(folder):
    content = json.loads(coco())
    content["categories"].append({"id": 2, "name": "cell"})
    (folder / "a.json").write_text(json.dumps(content))
    assert "several classes are called 'cell'" in read_annotations(folder / "a.json", folder / "images").notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("road:-1,0,0::\nsky:1,2,3::", "the color of 'road' is [-1, 0, 0]"),
        (f"road:{NUMBER_OF_5000_DIGITS},0,0::\nsky:1,2,3::", "has no color NAME:R,G,B"),
    ],
)
def test_colors_of_labelmap_are_checked(tmp_path, text, message):
    (tmp_path / "labelmap.txt").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        parse_class_file(tmp_path / "labelmap.txt")
