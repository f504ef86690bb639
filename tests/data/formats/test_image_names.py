"""Names of files: another case, Unicode form, separator or folder, repetitions, photos that are missing."""

import json
import unicodedata

import pytest
from helpers.annotation_files import coco, draw, draw_images, named_boxes, voc, write, yolo
from PIL import Image

from vitkit.apps.datasets.merging import merge_datasets
from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.tools.data import convert


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


@pytest.mark.parametrize("photos", [("valid/2.jpg",), ()])
def test_missing_photos_of_a_split_are_not_those_of_another_one(tmp_path, photos):
    draw_images(tmp_path, *(f"train/{k}.jpg" for k in range(3)), *photos)
    for folder, x in (("train", 1), ("valid", 5)):
        rows = "".join(f"{k}.jpg,cat,{x},2,{x + 9},12\n" for k in range(3))
        write(tmp_path / folder / "_annotations.csv", f"filename,class,xmin,ymin,xmax,ymax\n{rows}")
    data = read_annotations(tmp_path)
    assert {name: bbox[0] for name, _, bbox in named_boxes(data)} == {
        **{f"train/{k}.jpg": 1 for k in range(3)},
        **dict.fromkeys(photos, 5),
    }
    assert len(data.annotations) == 3 + len(photos) and not data.notes
    assert list(map(len, data.left_out.values())) == [3 - len(photos)]


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
    assert [box[0] for _, _, box in named_boxes(data)] == ([1, 2] if present == "mon" else [3, 4])
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


def test_image_in_both_splits_is_listed_once(tmp_path):
    first = read_annotations(yolo(tmp_path / "first", "0.5 0.5 0.5 0.5", "0.3 0.3 0.2 0.2"))
    assert len(first.images) == 1 and len(first.annotations) == 2 and first.splits == {"train": [1], "val": [1]}
    assert first.notes == ["1 image is in both train and val, such as images/a.png"]
    second = read_annotations(yolo(tmp_path / "second", "0.5 0.5 0.5 0.5"))
    merged = merge_datasets([first, second], {}, tmp_path / "merged")
    assert len(merged.images) == 2 and len(merged.annotations) == 3
    draw(tmp_path / "b.png")
    file = write(
        tmp_path / "b.csv", "file,class,xmin,ymin,xmax,ymax,split\nb.png,cat,1,1,9,9,train\nb.png,cat,2,2,9,9,val\n"
    )
    data = read_annotations(file, tmp_path)
    assert len(data.images) == 1 and len(data.annotations) == 2 and data.splits == {"train": [1], "val": [1]}


def test_files_that_stand_for_several_images_are_noted(tmp_path):
    for k in range(4):
        draw(tmp_path / "images" / f"frame_{k}.PNG")
    for split in ("Train", "Validation"):
        images = [{"id": k, "file_name": f"frame_{k}.PNG", "width": 40, "height": 20} for k in range(4)]
        content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
        write(tmp_path / "annotations" / f"instances_{split}.json", content)
    notes = read_annotations(tmp_path).notes
    assert any(note.startswith("4 files stand for 8 images, such as frame_0.PNG") for note in notes)


@pytest.mark.parametrize(
    "names", [["images\\0.png", "images\\1.png"], ["0.png", "..\\images\\1.png"], ["C:\\x\\images\\0.png", "1.png"]]
)
def test_backslashes_separate_folders(tmp_path, names):
    images = []
    for k, name in enumerate(names):
        draw(tmp_path / "images" / f"{k}.png")
        images.append({"id": k, "file_name": name, "width": 40, "height": 20})
    annotations = [{"id": k, "image_id": k, "category_id": 1, "bbox": [k, 1, 9, 9]} for k in range(2)]
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    file = write(tmp_path / "own.json", content)
    data = read_annotations(file, tmp_path / "images")
    assert [image["file_name"] for image in data.images] == ["0.png", "1.png"]
    assert any("backslashes" in note for note in data.notes)
    assert len(CocoDetection(tmp_path / "images", file)[1]["target"]["labels"]) == 1
    captions = [{"image_id": k, "caption": "a cat"} for k in range(2)]
    file = write(tmp_path / "captions.json", {"images": images, "annotations": captions})
    assert CocoCaptions(tmp_path / "images", file, min_count=1).image_path(1).name == "1.png"


COMPOSED, SEPARATE = (unicodedata.normalize(form, "Müller é") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(("listed", "stored"), [(COMPOSED, SEPARATE), (SEPARATE, COMPOSED)])
def test_names_in_another_unicode_form_are_found_in_every_format(tmp_path, listed, stored):
    draw(tmp_path / "images" / f"{stored}.png")
    file = coco(tmp_path, {}, name=f"{listed}.png")
    assert read_annotations(file, tmp_path / "images").images[0]["file_name"] == f"{stored}.png"
    assert len(CocoDetection(tmp_path / "images", file)[0]["target"]["labels"]) == 1
    write(tmp_path / "labels" / f"{listed}.txt", "0 0.5 0.5 0.5 0.5\n")
    assert len(read_annotations(tmp_path / "labels").annotations) == 1
    box = "<bndbox><xmin>3</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    text = f"<annotation><object><name>cat</name>{box}</object></annotation>"
    write(tmp_path / "Annotations" / f"{listed}.xml", text)
    write(tmp_path / "ImageSets" / "Main" / "val.txt", f"{listed}\n")
    data = read_annotations(tmp_path / "Annotations", tmp_path / "images")
    assert len(data.annotations) == 1 and data.splits == {"val": [1]}
    shape = {"label": "cat", "points": [[4, 4], [9, 9]], "shape_type": "rectangle"}
    write(tmp_path / "labelme" / f"{listed}.json", {"shapes": [shape]})
    assert len(read_annotations(tmp_path / "labelme", tmp_path / "images").annotations) == 1
    write(tmp_path / "own.csv", f"file,class,xmin,ymin,xmax,ymax\n{listed}.png,cat,1,1,9,9\n")
    assert len(read_annotations(tmp_path / "own.csv", tmp_path / "images").annotations) == 1
    text = f'<annotations><image name="{listed}.png" width="40" height="20"/></annotations>'
    assert len(read_annotations(write(tmp_path / "cvat.xml", text), tmp_path / "images").images) == 1


def test_a_sheet_beside_the_file_is_not_taken_for_its_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    draw(tmp_path / "images/a.png")
    file = coco(tmp_path, {"bbox": [4, 4, 20, 10]})
    for out in ("one.json", "two.json"):
        convert.main([file.name, "--out", out])
        assert (tmp_path / out.replace(".json", "_sheet.png")).is_file()


@pytest.mark.parametrize("kind", ["voc", "labelme", "csv", "cvat", "label_studio"])
def test_an_unlabeled_photo_is_not_that_of_a_missing_folder(tmp_path, kind):
    draw_images(tmp_path / "images", "mon/1.jpg", "mon/2.jpg", "mon/3.jpg")
    data = read_annotations(write_listed(tmp_path, kind, ["mon/1", "tue/3"]), tmp_path / "images")
    assert [image["file_name"] for image in data.images] == ["mon/1.jpg"] and len(data.annotations) == 1
    assert any("3" in name for names in data.left_out.values() for name in names)


def test_bare_names_are_found_in_folders_beside_paths_with_them(tmp_path):
    draw_images(tmp_path / "images", "mon/1.jpg", "tue/2.jpg", "Wed/3.jpg")
    data = read_annotations(write_listed(tmp_path, "csv", ["mon/1", "2", "wed/3"]), tmp_path / "images")
    assert [image["file_name"] for image in data.images] == ["mon/1.jpg", "tue/2.jpg", "Wed/3.jpg"]


@pytest.mark.parametrize("kind", ["voc", "labelme"])
def test_files_that_state_another_image_than_their_own_name_are_noted(tmp_path, kind):
    draw_images(tmp_path, "0.jpg", "1.jpg", "cat.jpg")
    for name, stated in (("0", "cat.jpg"), ("1", "no.jpg"), ("cat", "cat.jpg")):
        if kind == "voc":
            path = voc(tmp_path, name, ("cat", 2, 2, 9, 9))
            path.write_text(path.read_text().replace(f"{name}.jpg", stated))
        else:
            shape = {"label": "cat", "shape_type": "rectangle", "points": [[2, 2], [9, 9]]}
            write(tmp_path / f"{name}.json", {"shapes": [shape], "imagePath": stated})
    data = read_annotations(tmp_path)
    assert len(data.images) == 3
    suffix = ".xml" if kind == "voc" else ".json"
    note = "1 file states another image than that of their own name, which is taken, such as 0"
    assert [text for text in data.notes if "states" in text] == [note + suffix]
