"""labelme's JSON."""

import base64
import io
import json

import numpy as np
from helpers.annotation_files import boxes, draw, draw_images, named_boxes, write
from PIL import Image

from vitkit.data.formats import read_annotations


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
    assert sorted(named_boxes(data)) == [
        ("a.jpg", "cat", [0, 0, 14, 4]),
        ("a.jpg", "cat", [5, 6, 4, 3]),
        ("a.jpg", "dog", [2, 4, 10, 5]),
    ]
    assert data.left_out == {"shapes of type point": ["a.json shape 5"]}


def test_folders_of_splits_are_those_of_any_format(tmp_path):
    for name in ("train/a", "val/b", "extra/c"):
        draw_images(tmp_path, f"{name}.jpg")
        shape = {"label": "cat", "points": [[2, 2], [12, 12]], "shape_type": "rectangle"}
        content = {"shapes": [shape], "imagePath": f"{name[-1]}.jpg", "imageWidth": 40, "imageHeight": 20}
        write(tmp_path / f"{name}.json", json.dumps(content))
    data = read_annotations(tmp_path)
    names = {image["id"]: image["file_name"] for image in data.images}
    assert {split: [names[k] for k in ids] for split, ids in data.splits.items()} == {
        "train": ["train/a.jpg"],
        "val": ["val/b.jpg"],
    }


def test_shapes_that_labelme_ignores_are_counted(tmp_path):
    draw(tmp_path / "a.png")
    corners = [[4, 4], [24, 4], [24, 14], [4, 14]]
    shapes = [("cat", "rotation"), ("__ignore__", "polygon"), ("_background_", "polygon"), ("cat", "cuboid")]
    content = [{"label": label, "points": corners, "shape_type": kind} for label, kind in shapes]
    data = read_annotations(write(tmp_path / "a.json", {"shapes": content}), tmp_path)
    assert boxes(data) == [[4, 4, 20, 10]] and [c["name"] for c in data.categories] == ["cat"]
    assert {*data.left_out} == {"shapes labeled __ignore__", "shapes labeled _background_", "shapes of type 'cuboid'"}


def test_difficult_objects_of_x_anylabeling_are_kept(tmp_path):
    draw_images(tmp_path, "a.jpg")
    rectangle = {"label": "cat", "shape_type": "rectangle", "points": [[2, 2], [9, 9]]}
    polygon = {"label": "cat", "points": [[2, 2], [9, 2], [9, 9]]}
    shapes = [shape | {"difficult": flag} for shape in (rectangle, polygon) for flag in (True, False)]
    write(tmp_path / "a.json", {"shapes": shapes, "imagePath": "a.jpg"})
    flags = [annotation.get("difficult", 0) for annotation in read_annotations(tmp_path).annotations]
    assert flags == [1, 0, 1, 0]
