"""Annotations that state another size than the file's, in every format."""

import numpy as np
import pytest
from helpers.annotation_files import SQUARE, boxes, coco, draw, mask_of, write
from PIL import Image
from pycocotools import mask as coco_mask

from vitkit.apps.starter import annotation_sheet
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.tools.data import convert


def with_size(kind, folder, size):
    """Annotations of the box [4, 4, 20, 10] in an image of this size, at that size."""
    width, height = size
    x, y, w, h = (round(value * width / 40) for value in (4, 4, 20, 10))
    if kind == "coco":
        return coco(folder, {"bbox": [x, y, w, h]}, size=size)
    if kind == "csv":
        return write(
            folder / "own.csv",
            f"filename,width,height,class,xmin,ymin,xmax,ymax\na.png,{width},{height},cat,{x},{y},{x + w},{y + h}\n",
        )
    if kind == "voc":
        corners = f"<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + w}</xmax><ymax>{y + h}</ymax>"
        sides = f"<size><width>{width}</width><height>{height}</height></size>"
        return write(
            folder / "a.xml",
            f"<annotation>{sides}<object><name>cat</name><bndbox>{corners}</bndbox></object></annotation>",
        )
    if kind == "labelme":
        shape = {"label": "cat", "points": [[x, y], [x + w, y + h]], "shape_type": "rectangle"}
        return write(folder / "a.json", {"shapes": [shape], "imageWidth": width, "imageHeight": height})
    shape = f'<box label="cat" xtl="{x}" ytl="{y}" xbr="{x + w}" ybr="{y + h}"/>'
    return write(
        folder / "a.xml",
        f'<annotations><image name="a.png" width="{width}" height="{height}">{shape}</image></annotations>',
    )


KINDS = ["coco", "csv", "voc", "labelme", "cvat"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(80, 40), (20, 10), (40, 20)])
def test_boxes_are_scaled_to_the_file_in_every_format(tmp_path, kind, size):
    draw(tmp_path / "a.png")
    data = read_annotations(with_size(kind, tmp_path, size), tmp_path, format=kind)
    assert boxes(data) == [[4, 4, 20, 10]] and (data.images[0]["width"], data.images[0]["height"]) == (40, 20)
    text = (
        f"1 image is listed with another size than the file's, such as 'a.png', {size[0]}x{size[1]} for a file of 40x20"
    )
    assert any(note.startswith(text) for note in data.notes) == (size != (40, 20))
    assert data.changed == ({1} if size != (40, 20) else set())
    dataset = CocoDetection(tmp_path, with_size(kind, tmp_path, size), format=kind)
    assert dataset.load_annotated(0).boxes_xyxy.tolist() == [[4, 4, 24, 14]]
    assert dataset.ground_truth()["annotations"][0]["bbox"] == [4, 4, 20, 10]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(80, 60), (41, 20), (100, 20)])
def test_other_sizes_are_an_error_in_every_format(tmp_path, kind, size):
    draw(tmp_path / "a.png")
    with pytest.raises(DataError, match=rf"'a.png' is 40x20 pixels .* annotated as {size[0]}x{size[1]}.*--fix sizes"):
        read_annotations(with_size(kind, tmp_path, size), tmp_path, format=kind)
    dataset = CocoDetection(tmp_path, with_size(kind, tmp_path, size), format=kind)
    with pytest.raises(DataError, match=rf"a.png' is 40x20 pixels .* annotated as {size[0]}x{size[1]}"):
        dataset[0]


def test_masks_and_keypoints_are_scaled(tmp_path):
    draw(tmp_path / "a.png")
    mask = np.zeros((40, 80), np.uint8, order="F")
    mask[8:28, 8:48] = 1
    compressed = coco_mask.encode(mask)
    runs = {"size": [40, 80], "counts": compressed["counts"].decode()}
    columns = mask.T.ravel()
    lengths = np.diff(np.flatnonzero(np.diff(columns)) + 1, prepend=0, append=len(columns)).tolist()
    assert sum(lengths) == 3200
    file = coco(
        tmp_path,
        {
            "bbox": [8, 8, 40, 20],
            "area": 800,
            "segmentation": [[2 * v for v in SQUARE[0]]],
            "keypoints": [10, 20, 2, 0, 0, 0],
        },
        {"bbox": [8, 8, 40, 20], "segmentation": runs},
        {
            "bbox": [8, 8, 40, 20],
            "segmentation": {"size": [40, 80], "counts": [0, *lengths] if columns[0] else lengths},
        },
        size=(80, 40),
    )
    data = read_annotations(file, tmp_path)
    expected = np.zeros((20, 40), np.uint8)
    expected[4:14, 4:24] = 1
    for annotation in data.annotations:
        assert annotation["bbox"] == [4, 4, 20, 10] and annotation["area"] == 200
        assert (mask_of(annotation, (40, 20)) == expected).all()
    assert data.annotations[0]["keypoints"] == [5, 10, 2, 0, 0, 0]
    assert CocoDetection(tmp_path, file, masks=True)[0]["target"]["masks"].sum() == 600


def test_sizes_that_are_wrong_although_the_boxes_fit_the_file_are_corrected_only(tmp_path):
    draw(tmp_path / "a.png")
    data = read_annotations(coco(tmp_path, {"bbox": [20, 4, 20, 10]}, size=(20, 10)), tmp_path)
    assert boxes(data) == [[20, 4, 20, 10]] and "only the sizes are corrected" in data.notes[0]
    runs = {"size": [20, 40], "counts": [0, 800]}
    data = read_annotations(coco(tmp_path, {"segmentation": runs}, size=(80, 40)), tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] and data.annotations[0]["segmentation"] == runs
    fractions = [{"bbox": [0.1, 0.2, 0.5, 0.5]}] * 2
    assert boxes(read_annotations(coco(tmp_path, *fractions, size=(80, 40)), tmp_path)) == [[0.1, 0.2, 0.5, 0.5]] * 2


@pytest.mark.parametrize("extent, count", [(22, 1), (30, 40)])  # a little beyond, and far beyond but one of many
def test_a_box_beyond_its_listed_image_does_not_stop_the_others_from_being_scaled(tmp_path, extent, count):
    draw(tmp_path / "a.png")
    inexact = {"bbox": [10, 2, extent - 10, 5]}
    file = coco(tmp_path, *[{"bbox": [2, 2, 10, 5]}] * count, inexact, size=(20, 10))
    data = read_annotations(file, tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] * count + [[20, 4, 2 * extent - 20, 10]]
    assert "boxes, masks and keypoints are scaled" in data.notes[0]


def test_fix_sizes_leaves_no_box_at_a_wrong_place(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    arguments = ["own.json", "--images", ".", "--fix", "sizes", "--overwrite", "--out", "fixed.json"]
    coco(tmp_path, {"bbox": [8, 8, 40, 20]}, size=(80, 40))
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[4, 4, 20, 10]]
    assert "boxes, masks and keypoints are scaled" in capsys.readouterr().out
    coco(tmp_path, {}, size=(80, 60))  # the box fits, so that only the size is taken to be wrong
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[4, 4, 20, 10]]
    coco(tmp_path, {"bbox": [50, 4, 20, 10]}, size=(80, 60))
    with pytest.raises(SystemExit, match=r"'a.png' is 40x20 .* 80x60, and .* bbox \[50, 4, 20, 10\] does not lie in"):
        convert.main(arguments)


def test_objects_of_an_image_that_exif_turns_are_not_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    draw(tmp_path / "a.jpg", size=(20, 40), exif=exif)  # 40x20 upright
    arguments = ["own.json", "--images", ".", "--fix", "sizes", "--overwrite", "--out", "fixed.json"]
    coco(tmp_path, {"bbox": [4, 4, 10, 10]}, size=(20, 40), name="a.jpg")
    with pytest.raises(SystemExit, match="rotated by its EXIF tag, and its objects fit it both before and after"):
        convert.main(arguments)
    coco(tmp_path, {"bbox": [20, 4, 20, 10]}, size=(20, 40), name="a.jpg")
    convert.main(arguments)
    assert boxes(read_annotations("fixed.json", ".")) == [[20, 4, 20, 10]]


def test_sheet_shows_the_repaired_images(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    images, annotations = [], []
    for k in range(30):
        draw(tmp_path / f"{k:02}.png", seed=k)
        swapped = k in (17, 23)
        images.append(
            {"id": k, "file_name": f"{k:02}.png", "width": 20 if swapped else 40, "height": 40 if swapped else 20}
        )
        annotations.append({"id": k, "image_id": k, "category_id": 1, "bbox": [1, 1, 8, 8]})
    write(
        tmp_path / "own.json", {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    )
    shown = []
    monkeypatch.setattr(annotation_sheet, "save_grid", lambda panels, titles, path: shown.append(titles))
    convert.main(["own.json", "--images", ".", "--fix", "sizes", "--out", "fixed.json"])
    assert shown == [["17.png", "23.png"]]
