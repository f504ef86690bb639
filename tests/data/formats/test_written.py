"""What is written in another format and read again."""

import numpy as np
import pytest
from helpers.annotation_files import coco_with, draw_images, named_boxes, write

from vitkit.apps.datasets.writing import WRITERS, join_polygons, outlines
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError
from vitkit.io.segmentations import decode_segmentation, polygon_box


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
    assert [(name, box) for _, name, box in named_boxes(again)] == [(name, box) for _, name, box in named_boxes(data)]


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


@pytest.mark.parametrize("to", ["yolo", "voc"])
def test_images_that_would_share_a_label_file_are_named(tmp_path, to):
    data = coco_with(tmp_path, [10, 5, 6, 6])
    draw_images(tmp_path, "a.bmp")
    data.add_image("a.bmp", 40, 20)
    with pytest.raises(DataError, match="'a.bmp' and 'a.png' would have one label file"):
        WRITERS[to](data, tmp_path / "out", {})
