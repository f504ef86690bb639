"""VGG Image Annotator's files."""

import json

import numpy as np
import pytest
from helpers.annotation_files import SQUARE, boxes, coco, draw, write

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.formats import read_annotations
from vitkit.errors import DataError


def test_vias_coco_file_is_read_or_named(tmp_path):
    draw(tmp_path / "a.png")
    file = coco(tmp_path, {"image_id": "1", "segmentation": SQUARE[0]})
    data = read_annotations(file, tmp_path)
    assert data.annotations[0]["segmentation"] == SQUARE and data.annotations[0]["image_id"] == 1
    assert CocoDetection(tmp_path, file, masks=True)[0]["target"]["masks"].sum() == 200
    file = coco(tmp_path, {"category_id": None, "segmentation": SQUARE[0]})
    for read in (read_annotations, lambda source, images: CocoDetection(images, source)):
        with pytest.raises(DataError, match="own.json: 1 annotation has category_id null: VIA writes so.*CSV or JSON"):
            read(file, tmp_path)


SHAPES = {
    "rect": {"name": "rect", "x": 4, "y": 4, "width": 20, "height": 10},
    "polygon": {"name": "polygon", "all_points_x": [4, 24, 24, 4], "all_points_y": [4, 4, 14, 14]},
    "circle": {"name": "circle", "cx": 10, "cy": 10, "r": 5},
    "ellipse": {"name": "ellipse", "cx": 10, "cy": 10, "rx": 8, "ry": 4, "theta": np.pi / 2},
}


BOXES = {"rect": [4, 4, 20, 10], "polygon": [4, 4, 20, 10], "circle": [5, 5, 10, 10], "ellipse": [6, 2, 8, 16]}


def via_csv(folder, regions, *, names=("a.png",)):
    header = "filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes\n"
    rows = [header]
    for name in names:
        rows += [
            f'{name},1,"{{}}",{len(regions)},{k},"{_quoted(shape)}","{_quoted(attributes)}"\n'
            for k, (shape, attributes) in enumerate(regions)
        ]
    return write(folder / "via.csv", "".join([*rows, 'empty.png,1,"{}",0,0,"{}","{}"\n']))


def _quoted(value):
    return json.dumps(value).replace('"', '""')


@pytest.mark.parametrize("kind", SHAPES)
def test_vias_regions_are_read(tmp_path, kind):
    draw(tmp_path / "a.png")
    draw(tmp_path / "empty.png")
    regions = [(SHAPES[kind], {"class": "cat"}), ({"name": "point", "cx": 1, "cy": 1}, {"class": "dog"})]
    entries = [{"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in regions]
    project = {
        "_via_settings": {},
        "_via_img_metadata": {
            "a.png1": {"filename": "a.png", "regions": entries},
            "empty.png1": {"filename": "empty.png", "regions": []},
        },
    }
    write(tmp_path / "json" / "project.json", project)
    for source in (via_csv(tmp_path, regions), tmp_path / "json" / "project.json"):
        data = read_annotations(source, tmp_path)
        assert np.allclose(boxes(data), [BOXES[kind]], atol=1e-3) and [c["name"] for c in data.categories] == ["cat"]
        assert len(data.images) == 2 and {*data.left_out} == {"regions of the shape 'point'"}


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_images_of_one_name_in_via_are_told_apart_by_their_sizes(tmp_path, kind):
    draw(tmp_path / "a.png")
    size = (tmp_path / "a.png").stat().st_size
    regions = [(number, {**SHAPES["rect"], "x": number % 7}, {"class": "cat"}) for number in (size + 1, size)]
    if kind == "json":
        project = {
            f"a.png{number}": {
                "filename": "a.png",
                "size": number,
                "regions": [{"shape_attributes": shape, "region_attributes": attributes}],
            }
            for number, shape, attributes in regions
        }
        source = write(tmp_path / "via.json", project)
    else:
        rows = [f'a.png,{n},"{_quoted(shape)}","{_quoted(attributes)}"\n' for n, shape, attributes in regions]
        header = "filename,file_size,region_shape_attributes,region_attributes\n"
        source = write(tmp_path / "via.csv", "".join([header, *rows]))
    data = read_annotations(source, tmp_path)
    assert boxes(data) == [[size % 7, 4, 20, 10]]
    assert data.left_out == {"images that the file lists but the folder does not have": ["a.png"]}


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"species": "cat"}, "cat"),
        ({"species": {"cat": True}}, "cat"),
        ({"species": "cat", "label": "dog"}, "dog"),
        ({"species": "cat", "color": "red"}, "attributes 'species, color'; expected one, or one called class"),
        ({}, "no region has attributes"),
        ({"species": ""}, "attribute 'species' is ''"),
    ],
)
def test_class_of_vias_regions_is_chosen_or_an_error(tmp_path, attributes, expected):
    draw(tmp_path / "a.png")
    file = via_csv(tmp_path, [(SHAPES["rect"], attributes)])
    if " " in expected:
        with pytest.raises(DataError, match=expected):
            read_annotations(file, tmp_path)
    else:
        assert read_annotations(file, tmp_path).categories[0]["name"] == expected
