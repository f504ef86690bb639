"""Pascal VOC's XML files."""

import pytest
from helpers.annotation_files import boxes, coco_with, draw, draw_images, named_boxes, voc, write

from vitkit.apps.datasets.writing import write_voc
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError


def test_voc_counts_pixels_from_one_and_keeps_its_flags(tmp_path):
    draw_images(tmp_path / "JPEGImages", "a.jpg", "unlabeled.jpg")
    voc(tmp_path / "Annotations", "a", ("dog", 1, 1, 10, 5), ("cat", 3, 2, 3, 2))
    voc(tmp_path / "Annotations", "lost", ("dog", 1, 1, 2, 2))
    data = read_annotations(tmp_path)
    assert named_boxes(data) == [("a.jpg", "dog", [0, 0, 10, 5]), ("a.jpg", "cat", [2, 1, 1, 1])]
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
    assert named_boxes(data) == [("a.jpg", "dog", [0, 1, 10, 4])] and "begin at 0" in data.notes[0]


def test_fractions_in_voc_are_multiplied_and_do_not_count_from_one(tmp_path):
    draw_images(tmp_path, "a.jpg", "b.jpg")
    voc(tmp_path, "a", ("cat", 0.1, 0.1, 0.4, 0.3))
    voc(tmp_path, "b", ("cat", 0, 0.0625, 1, 1.001))
    data = read_annotations(tmp_path)
    assert named_boxes(data) == [("a.jpg", "cat", [4, 2, 12, 4]), ("b.jpg", "cat", [0, 1.25, 40, 18.77])]
    assert data.notes[0] == "no number is above 1, apart from rounding: the boxes are fractions of their image"


def test_xml_with_entities_is_refused(tmp_path):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><annotation><filename>&b;</filename></annotation>')
    with pytest.raises(DataError, match="declares a document type"):
        read_annotations(tmp_path, format="voc")


@pytest.mark.parametrize(("value", "flag"), [(True, "1"), (2, "1"), ("1", "1"), (False, "0"), ("0", "0"), (None, "0")])
def test_flags_of_other_tools_are_written_as_those_of_voc(tmp_path, value, flag):
    draw_images(tmp_path, "a.jpg")
    data = read_annotations(write(tmp_path / "boxes.csv", "a.jpg,10,5,30,15,cat\n"))
    data.annotations[0]["occluded"] = value
    write_voc(data, tmp_path / "out", {})
    assert f"<occluded>{flag}</occluded>" in next((tmp_path / "out").rglob("*.xml")).read_text()


def test_voc_boxes_beyond_the_border_do_not_shift_the_others(tmp_path):
    data, lost = coco_with(tmp_path, [-3, 2, 8, 4], [10, 5, 6, 6], [50, 2, 4, 4]), {}
    write_voc(data, tmp_path / "out", lost)
    again = read_annotations(tmp_path / "out")
    assert [annotation["bbox"] for annotation in again.annotations] == [[0, 2, 5, 4], [10, 5, 6, 6]]
    assert lost == {"parts of boxes outside their image": ["1"], "boxes outside their image": ["3"]}


def test_every_box_of_an_object_of_voc_is_read(tmp_path):
    draw(tmp_path / "a.png")
    bndbox = "<bndbox><xmin>{}</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    text = "<annotation><object><name>cat</name>{}</object></annotation>"
    file = write(tmp_path / "a.xml", text.format("".join(map(bndbox.format, (1, 3, 5)))))
    assert boxes(read_annotations(file, tmp_path)) == [[0, 2, 12, 10], [2, 2, 10, 10], [4, 2, 8, 10]]
    for inside in (
        "<name>dog</name>" + bndbox.format(1),
        bndbox.format(1).replace("<ymin>3</ymin>", "<ymin>3</ymin><ymin>4</ymin>"),
        "<difficult>0</difficult><difficult>1</difficult>" + bndbox.format(1),
    ):
        with pytest.raises(DataError, match="a.xml': .* has 2 elements '.*'; expected one"):
            read_annotations(write(tmp_path / "a.xml", text.format(inside)), tmp_path)
    with pytest.raises(DataError, match="an object has no bndbox, but name, robndbox"):
        read_annotations(write(tmp_path / "a.xml", text.format("<robndbox/>")), tmp_path)
    polygon = "<polygon><x1>1</x1></polygon>" + bndbox.format(1)
    data = read_annotations(write(tmp_path / "a.xml", text.format(polygon)), tmp_path)
    assert data.left_out == {"shapes of type polygon beside a box": ["a.xml 'cat'"]}


@pytest.mark.parametrize(
    "lines", [["A", "day/b"], ["JPEGImages/a.jpg Annotations/a.xml", "b.jpg"], ["/home/me/JPEGImages/a.jpg 1", "b -1"]]
)
def test_lists_of_voc_name_images_in_several_ways(tmp_path, lines):
    draw_images(tmp_path / "JPEGImages", "a.jpg", "day/b.jpg", "c.jpg")
    for name in ("a", "day/b", "c"):
        voc(tmp_path / "Annotations", name, ("cat", 2, 2, 9, 9))
    write(tmp_path / "ImageSets/Main/train2007.txt", lines[0])
    write(tmp_path / "ImageSets/Main/train2012.txt", lines[1])
    write(tmp_path / "ImageSets/Main/val.txt", "c\nmissing\n")
    (tmp_path / "ImageSets/Main/._train2007.txt").write_bytes(b"\0\5\x16\7\xff")  # as macOS writes beside it
    data = read_annotations(tmp_path)
    names = {image["id"]: image["file_name"] for image in data.images}
    splits = {split: [names[number] for number in ids] for split, ids in data.splits.items()}
    assert splits == {"train": ["a.jpg", "day/b.jpg"], "val": ["c.jpg"]}
    assert data.left_out == {"names in val.txt without annotated image": ["missing"]}


def test_trainval_is_train_where_no_list_is(tmp_path):
    draw_images(tmp_path / "JPEGImages", "a.jpg", "b.jpg")
    for name in ("a", "b"):
        voc(tmp_path / "Annotations", name, ("cat", 2, 2, 9, 9))
        write(tmp_path / f"ImageSets/Main/{'trainval' if name == 'a' else 'test'}.txt", name)
    assert read_annotations(tmp_path).splits == {"train": [1], "test": [2]}
    write(tmp_path / "ImageSets/Main/train.txt", "")
    assert read_annotations(tmp_path).splits == {"test": [2]}
