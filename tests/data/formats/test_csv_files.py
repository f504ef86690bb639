"""Tables: which columns are the box, Open Images' groups, folders of splits."""

import pytest
from helpers.annotation_files import boxes, draw, draw_images, named_boxes, write

from vitkit.data.formats import read_annotations
from vitkit.errors import DataError


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
    assert named_boxes(data) == [("a.jpg", "cat", [10, 5, 20, 10])]


@pytest.mark.parametrize(("first", "scale"), [(1, (1, 1)), (0, (1, 1)), (1, (40, 20))])
def test_corners_of_quadrilaterals_in_csv_are_polygons(tmp_path, first, scale):
    draw_images(tmp_path, "a.jpg", "b.jpg")
    polygons = {"a.jpg": [10, 5, 30, 5, 30, 15, 10, 15], "b.jpg": [10, 5, 30, 7, 28, 15, 8, 13]}
    columns = [f"{axis}{k}" for k in range(first, first + 4) for axis in "xy"]
    rows = [[name, *(value / scale[k % 2] for k, value in enumerate(p)), "cat"] for name, p in polygons.items()]
    text = "\n".join(",".join(map(str, row)) for row in (["filename", *columns, "class"], *rows))
    data = read_annotations(write(tmp_path / "boxes.csv", text))
    assert named_boxes(data) == [("a.jpg", "cat", [10, 5, 20, 10]), ("b.jpg", "cat", [8, 5, 22, 10])]
    assert [annotation["segmentation"] for annotation in data.annotations] == [[p] for p in polygons.values()]


@pytest.mark.parametrize("form", ['"[6.0, 8, 24, 10.0]"', "6 8 24 10", '"(6, 8, 24, 10)"', "[ 6.  8. 24. 10.]"])
def test_a_column_that_holds_the_whole_box_is_read(tmp_path, form):
    draw_images(tmp_path / "train", "0.png", "1.png")
    text = f"image_id,width,height,bbox,source\n0,40,20,{form},farm\n1,40,20,[],farm\n"
    data = read_annotations(write(tmp_path / "train.csv", text), tmp_path / "train")
    assert named_boxes(data) == [("0.png", "object", [6, 8, 24, 10])] and len(data.images) == 2
    assert "the column 'bbox' is read as [x, y, width, height]" in data.notes
    data = read_annotations(write(tmp_path / "train.csv", text.replace("source", "label")), tmp_path / "train")
    assert named_boxes(data) == [("0.png", "farm", [6, 8, 24, 10])]
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
    assert sorted(named_boxes(data)) == [
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


def test_a_column_of_angles_is_said_not_to_be_read(tmp_path):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "boxes.csv", "filename,cx,cy,w,h,angle,class\na.jpg,20,10,8,4,45,cat\n")
    notes = read_annotations(tmp_path / "boxes.csv", tmp_path).notes
    assert any("the column 'angle' of boxes.csv is not read" in note for note in notes)


def test_ambiguous_csv_columns_are_an_error(tmp_path):
    draw_images(tmp_path, "a.jpg")
    path = write(tmp_path / "b.csv", "file,class,xmin,ymin,xmax,ymax,x,y,w,h\na,cat,1,1,2,2,1,1,1,1\n")
    with pytest.raises(DataError, match=r"xmin,ymin,xmax,ymax \(xyxy\) or x,y,w,h \(xywh\)"):
        read_annotations(path, format="csv")


def test_groups_of_open_images_are_crowds(tmp_path):
    draw_images(tmp_path, "a.jpg")
    rows = ["a,Cat,0.1,0.5,0.1,0.5,0", "a,Cat,0.5,0.9,0.5,0.9,1"]
    write(tmp_path / "boxes.csv", "\n".join(["ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf", *rows]))
    data = read_annotations(tmp_path / "boxes.csv")
    assert [annotation["iscrowd"] for annotation in data.annotations] == [0, 1]


def test_line_of_a_table_that_differs_is_the_one_named(tmp_path):
    for k in range(3):
        draw(tmp_path / f"{k}.png")
    header, fractions = "file,class,xmin,ymin,xmax,ymax\n", "cat,0.75,0.25,1.0,0.75\n"
    text = header + "0.png,cat,{},0.25,{},0.75\n" + f"1.png,{fractions}2.png,{fractions}"
    data = read_annotations(write(tmp_path / "own.csv", text.format(0.75, 1.0003)), tmp_path)
    assert boxes(data) == [[30, 5, 10, 10]] * 3
    with pytest.raises(
        DataError, match=r"own.csv line 2: \[30.0, 0.25, 40.0, 0.75\] are pixels, most other lines have fr"
    ):
        read_annotations(write(tmp_path / "own.csv", text.format(30, 40)), tmp_path)
    pixels = f"{header}0.png,cat,1,1,9,9\n1.png,cat,0.1,0.1,0.5,0.5\n2.png,cat,1,1,9,9\n"
    with pytest.raises(DataError, match="own.csv line 3: .* are fractions, most other lines have pixels"):
        read_annotations(write(tmp_path / "own.csv", pixels), tmp_path)
    sizes = "filename,width,height,class,xmin,ymin,xmax,ymax\n0.png,40,20,cat,1,1,9,9\n0.png,{},20,cat,1,1,9,9\n"
    for width, message in (
        (80, "line 3: '0.png' is 80x20 pixels here and 40x20 in an earlier line"),
        ("x", "line 3: the image's size is 'x'"),
    ):
        with pytest.raises(DataError, match=message):
            read_annotations(write(tmp_path / "own.csv", sizes.format(width)), tmp_path)


@pytest.mark.parametrize(
    ("column", "field"), [("IsGroupOf", "iscrowd"), ("iscrowd", "iscrowd"), ("difficult", "difficult")]
)
@pytest.mark.parametrize(("value", "flag"), [("1.0", 1), ("TRUE", 1), ("yes", 1), ("0", 0), ("0.0", 0), ("", 0)])
def test_flags_in_columns_are_kept(tmp_path, column, field, value, flag):
    draw(tmp_path / "a.png")
    path = write(tmp_path / "a.csv", f"file,class,xmin,ymin,xmax,ymax,{column}\na.png,cat,1,1,9,9,{value}\n")
    assert read_annotations(path).annotations[0].get(field, 0) == flag


def test_names_are_taken_where_the_first_column_of_classes_has_numbers(tmp_path):
    draw(tmp_path / "a.png")
    head, line = "file,xmin,ymin,xmax,ymax,class", "a.png,1,1,9,9,16"
    data = read_annotations(write(tmp_path / "a.csv", f"{head},name\n{line},dog\n"))
    assert [category["name"] for category in data.categories] == ["dog"]
    assert "the class is the column 'name' of a.csv, as 'class' has only numbers" in data.notes
    data = read_annotations(write(tmp_path / "a.csv", f"{head}\n{line}\n"))
    assert [category["name"] for category in data.categories] == ["16"]


def test_a_table_without_a_header_is_named(tmp_path):
    draw(tmp_path / "a.png")
    with pytest.raises(DataError, match="two columns are called '1'. If it has no header, write one as the first"):
        read_annotations(write(tmp_path / "a.csv", "a.png,1,1,9,9,cat,64,64\n"), format="csv")
