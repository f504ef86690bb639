"""Polygons that extend beyond their image are written as the visible part of their masks."""

import json

import cv2
import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.writing import WRITERS, cut_polygon, overlap, write_voc
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.io.segmentations import decode_segmentation, polygon_fields, visible_box

WIDTH, HEIGHT = 90, 60
SHAPES = {
    "triangle at the left": [[-80, 30, 60, 5, 60, 55]],
    "triangle at a corner": [[50, 20, 160, 30, 60, 130]],
    "triangle around everything": [[-200, -100, 300, -90, 40, 400]],
    "fork, in parts at the border": [[20, 10, 130, 10, 130, 20, 40, 20, 40, 40, 130, 40, 130, 50, 20, 50]],
    "star": [[45, -30, 52, 20, 120, 30, 52, 40, 45, 95, 38, 40, -25, 30, 38, 20]],
    "two parts": [[-20, 5, 30, 5, 30, 25, -20, 25], [50, 30, 120, 30, 120, 50, 50, 50]],
    "overlapping parts": [[10, 10, 50, 10, 50, 40, 10, 40], [30, 20, 80, 20, 80, 50, 30, 50]],
    "one part outside": [[10, 10, 50, 10, 50, 40, 10, 40], [100, 20, 180, 20, 180, 50]],
    "less than a pixel": [[-1.0, 10.3, 0.4, 10.3, -1.0, 10.4]],
    "three pixels": [[-2, 10.2, 1.7, 10.1, 1.9, 11.3]],
    "a thin sliver": [[-9.39, 16.58, 52.59, -26.78, 56.13, -24.02]],
    "a sliver in parts": [[24.4, 30.82, -30.56, 21.29, -28.54, -1.12]],
}
FORMATS = ("yolo", "cvat", "label-studio")


def written(tmp_path, polygons, format="yolo"):
    """Write an object and read it again; returns its annotation, if there is one, and what was lost."""
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "a.png")
    data = AnnotatedImages("coco", tmp_path / "a.json", tmp_path)
    data.add_object(data.add_image("a.png", WIDTH, HEIGHT), "cat", **polygon_fields(polygons))
    data.splits = {"train": [1]}
    lost = {}
    WRITERS[format](data, tmp_path / "out", lost)
    if format == "yolo":
        label = (tmp_path / "out/labels/train/a.txt").read_text().split()
        assert all(0 <= float(value) <= 1 for value in label)
    again = read_annotations(tmp_path / "out", format=format).annotations
    return (again[0] if again else None), lost


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_visible_mask_survives(tmp_path, name, format):
    if format == "label-studio" and name in ("two parts", "overlapping parts"):
        pytest.skip("parts become separate objects there")
    annotation, lost = written(tmp_path, SHAPES[name], format)
    assert name == "less than a pixel" or overlap(annotation["segmentation"], SHAPES[name], HEIGHT, WIDTH) >= 0.99
    assert "masks outside their image" not in lost


def test_a_cut_triangle_stays_a_polygon_of_few_points(tmp_path):
    annotation, _ = written(tmp_path, SHAPES["triangle at the left"])
    assert len(annotation["segmentation"][0]) == 8


@pytest.mark.parametrize("format", [*FORMATS, "voc"])
def test_a_shape_that_only_surrounds_a_corner_of_the_image_is_counted(tmp_path, format):
    annotation, lost = written(tmp_path, [[-30, 20, -40, -40, 20, -30]], format)
    assert annotation is None and lost["masks outside their image"] == ["1"]


def test_cut_polygons_agree_with_the_masks_of_random_ones():
    rng = np.random.default_rng(0)
    for _ in range(200):
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 10)))
        radii, center = rng.uniform(20, 90, len(angles)), rng.uniform(-0.2, 1.2, 2) * (WIDTH, HEIGHT)
        polygon = (np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None] + center).ravel().tolist()
        cut = cut_polygon(polygon, HEIGHT, WIDTH)
        mask = decode_segmentation([polygon], HEIGHT, WIDTH)
        if not cut:
            assert mask.sum() <= 2
            continue
        points = np.reshape(cut, (-1, 2))
        assert (points >= 0).all() and (points <= (WIDTH, HEIGHT)).all()
        wrong = int((decode_segmentation([cut], HEIGHT, WIDTH) != mask).sum())
        outline = np.abs(points - np.roll(points, 1, axis=0)).sum()
        assert wrong <= 4 + 0.15 * outline


def test_the_box_of_a_cut_polygon_is_that_of_its_visible_part(tmp_path):
    # Cut at the left, the triangle is 10 pixels high there, and the box of the whole one would be 60 pixels high.
    polygon = [-60.0, 0.0, 12.0, 30.0, -60.0, 60.0]
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "a.png")
    data = AnnotatedImages("coco", tmp_path / "a.json", tmp_path)
    data.add_object(data.add_image("a.png", WIDTH, HEIGHT), "cat", **polygon_fields([polygon]))
    (tmp_path / "a.json").write_text(json.dumps(data.content))
    dataset = CocoDetection(tmp_path, tmp_path / "a.json", masks=True)
    sample = dataset.load_annotated(0)
    np.testing.assert_allclose(sample.boxes_xyxy, [[0, 25, 12, 35]], atol=1e-5)
    write_voc(data, tmp_path / "voc", lost := {})
    assert read_annotations(tmp_path / "voc").annotations[0]["bbox"] == [0, 25, 12, 10]
    assert lost["parts of boxes outside their image"] == ["1"]
    # A box that is not its polygon's, such as one of a partly hidden object, is only cut.
    annotation = {"bbox": [-60, 0, 80, 60], "segmentation": [polygon]}
    assert visible_box(annotation, HEIGHT, WIDTH) == [0, 0, 20, 60]


def test_visible_boxes_agree_with_the_masks_of_random_polygons():
    rng, scale = np.random.default_rng(1), 16
    for _ in range(200):
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 9)))
        center, radii = rng.uniform(0, [WIDTH, HEIGHT]), rng.uniform(20, 120, len(angles))
        points = center + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        mask = decode_segmentation([(scale * points).ravel().tolist()], scale * HEIGHT, scale * WIDTH)
        if mask.any():
            expected = [side / scale for side in cv2.boundingRect(mask)]
            box = visible_box(polygon_fields([points.ravel().tolist()]), HEIGHT, WIDTH)
            np.testing.assert_allclose(box, expected, atol=0.5)
