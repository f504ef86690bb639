"""Keypoints survive a conversion to YOLO's poses and CVAT's skeletons, and back."""

import json

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.fixing import FIXES
from vitkit.apps.datasets.merging import merge_datasets, tile_dataset
from vitkit.apps.datasets.writing import write_coco, write_cvat, write_yolo
from vitkit.apps.inference.tiling import Tile
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError

NAMES = ["nose", "left_hand", "right_hand"]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "images").mkdir()
    images, annotations = [], []
    rng = np.random.default_rng(0)
    for image_id in (1, 2):
        Image.fromarray(np.zeros((120, 160, 3), np.uint8)).save(tmp_path / "images" / f"{image_id}.png")
        images.append({"id": image_id, "file_name": f"{image_id}.png", "width": 160, "height": 120})
        for _ in range(2):
            points = rng.integers(20, 80, (3, 2))
            seen = rng.permutation([0, 1, 2])
            keypoints = np.column_stack([points * (seen > 0)[:, None], seen]).ravel().tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1, "image_id": image_id, "category_id": 1, "bbox": [16, 12, 80, 72],
                    "area": 5760, "iscrowd": 0, "keypoints": keypoints, "num_keypoints": 2,
                }
            )  # fmt: skip
    annotations[-1] = {k: v for k, v in annotations[-1].items() if "keypoints" not in k}
    categories = [{"id": 1, "name": "person", "keypoints": NAMES, "flip_pairs": [[2, 3]], "skeleton": [[1, 2]]}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "points.json").write_text(json.dumps(content))
    return read_annotations(tmp_path / "points.json", tmp_path / "images")


@pytest.mark.parametrize("format", ["yolo", "cvat", "coco"])
def test_points_survive(source, tmp_path, format):
    lost = {}
    write = {"yolo": write_yolo, "cvat": write_cvat, "coco": write_coco}[format]
    path, *_ = write(source, tmp_path / "out", lost)
    assert not lost
    images = source.folder if format == "coco" else None
    dataset = CocoDetection(images, path, keypoints=True, split="all" if format == "yolo" else None)
    assert dataset.keypoints.names == tuple(NAMES) and dataset.keypoints.flip_pairs == ((1, 2),)
    assert dataset.keypoints.skeleton == (() if format == "yolo" else ((0, 1),))
    original = CocoDetection(source.folder, source.source, keypoints=True)
    for index in range(2):
        ours, theirs = dataset[index]["target"], original[index]["target"]
        np.testing.assert_allclose(ours["keypoints"], theirs["keypoints"], atol=0.01)
        np.testing.assert_allclose(ours["boxes_cxcywh"], theirs["boxes_cxcywh"], atol=1e-4)


def test_yolo_says_how_points_are_exchanged(source, tmp_path):
    path, _ = write_yolo(source, tmp_path / "out", {})
    text = path.read_text()
    assert "kpt_shape:\n- 3\n- 3" in text and "flip_idx:\n- 0\n- 2\n- 1" in text
    path.write_text(text.replace("flip_idx:\n- 0\n- 2\n- 1", "flip_idx:\n- 1\n- 2\n- 0"))
    with pytest.raises(
        DataError, match="flip_idx is .*; expected each number 0 to 2 once, so that two points exchange"
    ):
        read_annotations(path, None)


SVG = """&lt;line x1="1" y1="2" x2="3" y2="4" data-type="edge" data-node-from="7" data-node-to="4"&gt;&lt;/line&gt;
    &lt;line x1="1" y1="2" x2="3" y2="4" data-type="edge" data-node-from="7" data-node-to="9"&gt;&lt;/line&gt;
    &lt;circle data-type="element node" data-node-id="4" data-label-name="1"&gt;&lt;/circle&gt;
    &lt;circle data-type="element node" data-node-id="7" data-label-name="2"&gt;&lt;/circle&gt;
    &lt;circle data-type="element node" data-node-id="9" data-label-name="3"&gt;&lt;/circle&gt;"""


def write_skeleton(folder, svg=SVG):
    """Write a CVAT file with a label that draws its skeleton."""
    Image.fromarray(np.zeros((60, 80, 3), np.uint8)).save(folder / "a.png")
    (folder / "annotations.xml").write_text(
        f"""<annotations><version>1.1</version>
        <meta><task><labels><label><name>cat</name><type>skeleton</type><svg>{svg}</svg></label>
        <label><name>1</name><type>points</type><parent>cat</parent></label>
        <label><name>2</name><type>points</type><parent>cat</parent></label>
        <label><name>3</name><type>points</type><parent>cat</parent></label></labels></task></meta>
        <image id="0" name="a.png" width="80" height="60"><skeleton label="cat" source="manual" z_order="0">
        <points label="2" source="manual" outside="0" occluded="1" points="30.50,40.25"></points>
        <points label="1" source="manual" outside="0" occluded="0" points="10.00,20.00"></points>
        <points label="3" source="manual" outside="1" occluded="0" points="0.00,0.00"></points>
        </skeleton></image></annotations>"""
    )
    return folder / "annotations.xml"


@pytest.mark.parametrize(
    ("svg", "message"),
    [
        (SVG.replace('data-node-to="9"', 'data-node-to="8"'), "draws a line to a circle that it does not have"),
        (
            SVG.replace('data-label-name="3"', 'data-label-name="tail"'),
            "draws a line to the point 'tail' that it does not",
        ),
        (SVG.replace("&lt;/line&gt;", ""), "is not XML"),
    ],
)
def test_wrong_drawings_of_skeletons_are_named(tmp_path, svg, message):
    with pytest.raises(DataError, match=f"annotations.xml': the SVG of the skeleton 'cat' {message}"):
        read_annotations(write_skeleton(tmp_path, svg), None)


def test_drawing_without_names_has_no_limbs(tmp_path):
    path = write_skeleton(tmp_path, SVG.replace("data-label-name", "data-label-id"))
    assert "skeleton" not in read_annotations(path, None).categories[0]


def test_skeleton_without_a_box_has_the_one_around_its_points(tmp_path):
    data = read_annotations(write_skeleton(tmp_path), None)
    assert data.categories == [{"id": 1, "name": "cat", "keypoints": ["1", "2", "3"], "skeleton": [[2, 1], [2, 3]]}]
    (annotation,) = data.annotations
    assert annotation["keypoints"] == [10, 20, 2, 30.5, 40.25, 1, 0, 0, 0] and annotation["num_keypoints"] == 2
    assert annotation["bbox"] == [10, 20, 20.5, 20.25]


def test_tiles_and_merged_data_have_their_points(source, tmp_path):
    tiles = [Tile(0, 0, 120, 60), Tile(0, 40, 120, 160)]
    tiled = tile_dataset(source, lambda height, width: tiles, tmp_path / "tiled", min_visible=0.1)
    write_coco(tiled, tmp_path / "tiled.json", {})
    dataset = CocoDetection(tiled.folder, tmp_path / "tiled.json", keypoints=True)  # which checks all points
    by_name = {image["id"]: image["file_name"] for image in tiled.images}
    whole = [a["keypoints"] for a in source.annotations if a["image_id"] == 1]
    compared = 0
    for annotation in tiled.annotations:
        name = by_name[annotation["image_id"]]
        if name.startswith("1_"):
            left, width = (0, 60) if name.startswith("1_0_") else (40, 120)
            shifted = [
                [
                    (x - left, y, v) if v and 0 <= x - left <= width else (0, 0, 0)
                    for x, y, v in zip(*[iter(points)] * 3)
                ]
                for points in whole
            ]
            assert [tuple(p) for p in zip(*[iter(annotation["keypoints"])] * 3)] in shifted
            compared += 1
    assert compared >= 3 and dataset.keypoints.flip_pairs == ((1, 2),)
    merged = merge_datasets([source, source], {}, tmp_path / "merged")
    assert merged.categories[0]["keypoints"] == NAMES and merged.categories[0]["flip_pairs"] == [[2, 3]]
    source.categories[0] = {**source.categories[0], "keypoints": NAMES[::-1]}
    other = read_annotations(source.source, source.folder)
    with pytest.raises(DataError, match="class 'person' has the keypoints .* Give them the same names"):
        merge_datasets([other, source], {}, tmp_path / "others")


@pytest.mark.parametrize(
    ("points", "fixed"),
    [
        ([300, 20, 2, 30, 40, 2, 20, 20, 1], [0, 0, 0, 30, 40, 2, 20, 20, 1]),  # outside the image
        ([155, 20, 2, 30, 40, 2, 20, 20, 1], [0, 0, 0, 30, 40, 2, 20, 20, 1]),  # far outside the box
        ([float("nan"), 20, 2, 30, 40, 2, 20, 20, 1], [0, 0, 0, 30, 40, 2, 20, 20, 1]),
        ([50, 20, 0, 30, 40, 2, 20, 20, 1], [0, 0, 0, 30, 40, 2, 20, 20, 1]),  # not labeled
        ([50.125, 20, 2, 30, 40, 2, 20, 20, 1], [50.125, 20, 2, 30, 40, 2, 20, 20, 1]),
        ([50, 20, 3, 30, 40, 2, 20, 20, 1], [50, 20, 3, 30, 40, 2, 20, 20, 1]),  # which nothing explains
        ([50, 20], [50, 20]),
    ],
)
def test_wrong_points_are_left_out(source, points, fixed):
    annotation = source.annotations[0] | dict(keypoints=points, num_keypoints=3)
    source.annotations[:] = [annotation]
    assert FIXES["keypoints"][0](source) == (points != fixed)
    assert annotation["keypoints"] == fixed and annotation["num_keypoints"] == (3 if points == fixed else 2)


def test_points_are_counted_again(source):
    source.annotations[0]["num_keypoints"] = 1
    assert FIXES["keypoints"][0](source) == 1 and source.annotations[0]["num_keypoints"] == 2
