"""Annotations in a wrong format are recognized and repaired."""

import json

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.fixing import FIXES, apply_corrections, likely_order, similar_classes, wrong_scale
from vitkit.data.formats.annotated import AnnotatedImages
from vitkit.errors import DataError

WIDTH, HEIGHT = 120, 80


def dataset(folder, *, num_boxes=200, format="coco"):
    """Return boxes with integer coordinates all over an image of 120x80."""
    Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "a.png")
    data = AnnotatedImages(format, folder / "a.json", folder)
    image_id = data.add_image("a.png", WIDTH, HEIGHT)
    rng = np.random.default_rng(0)
    for _ in range(num_boxes):
        width, height = rng.integers(4, 40, 2).tolist()
        x, y = int(rng.integers(0, WIDTH - width + 1)), int(rng.integers(0, HEIGHT - height + 1))
        data.add_object(image_id, "cell", [x, y, width, height])
    return data


def numbers(data):
    return [list(annotation["bbox"]) for annotation in data.annotations]


WRITTEN_AS = {
    "xywh": lambda x, y, w, h: [x, y, w, h],
    "xyxy": lambda x, y, w, h: [x, y, x + w, y + h],
    "cxcywh": lambda x, y, w, h: [x + w / 2, y + h / 2, w, h],
}


@pytest.mark.parametrize("order", WRITTEN_AS)
@pytest.mark.parametrize("fractions", [False, True])
def test_boxes_in_another_format_are_recognized_and_fixed(tmp_path, order, fractions):
    data = dataset(tmp_path)
    right = numbers(data)
    for annotation, box in zip(data.annotations, right):
        sides = (WIDTH, HEIGHT) * 2 if fractions else (1,) * 4
        annotation["bbox"] = [value / side for value, side in zip(WRITTEN_AS[order](*box), sides)]
    assert wrong_scale(data) == fractions and likely_order(data) == order
    fixes = ["fractions"] * fractions + [order]
    assert [FIXES[name][0](data) for name in fixes] == [200] * len(fixes)
    assert np.allclose(numbers(data), right, atol=2e-3)
    assert not wrong_scale(data) and likely_order(data) == "xywh"


@pytest.mark.parametrize("scale", [(WIDTH, HEIGHT), (1, 1)])
def test_polygons_and_keypoints_that_are_fractions_are_multiplied_with_the_boxes(tmp_path, scale):
    data = dataset(tmp_path, num_boxes=1)
    polygon, points = [12, 8, 48, 8, 48, 32], [18, 12, 2, 0, 0, 0, 24, 16, 1]
    factors = (*scale, 1)
    data.annotations[0] |= dict(
        bbox=[0.1, 0.1, 0.3, 0.3],
        area=0.045 if scale[0] > 1 else 432,
        segmentation=[[value / scale[k % 2] for k, value in enumerate(polygon)]],
        keypoints=[value / factors[k % 3] for k, value in enumerate(points)],
    )
    assert FIXES["fractions"][0](data) == 1
    (fixed,) = data.annotations
    assert fixed["bbox"] == [12, 8, 36, 24] and fixed["area"] == 432
    assert fixed["segmentation"] == [polygon] and fixed["keypoints"] == points


def test_few_or_correct_boxes_are_left_unchanged(tmp_path):
    data = dataset(tmp_path, num_boxes=3)
    data.annotations[0]["bbox"] = [100, 60, 30, 30]  # reaches out of the image, as real boxes may
    assert likely_order(data) == "xywh" and not wrong_scale(data)
    assert likely_order(dataset(tmp_path, num_boxes=0)) == "xywh"


def test_corners_in_yolo_are_recognized(tmp_path):
    data = dataset(tmp_path, format="yolo")
    for annotation, (x, y, width, height) in zip(data.annotations, numbers(data)):
        x1, y1 = x + width, y + height  # taken for a size
        annotation["bbox"] = [x - x1 / 2, y - y1 / 2, x1, y1]
    assert likely_order(data) == "xyxy"


def test_swapped_sizes_are_read_from_the_image_files(tmp_path):
    data = dataset(tmp_path)
    data.images[0].update(width=HEIGHT, height=WIDTH)
    assert FIXES["sizes"][0](data) == 1
    assert (data.images[0]["width"], data.images[0]["height"]) == (WIDTH, HEIGHT)


def test_class_name_variants_are_merged_into_the_most_frequent(tmp_path):
    data = dataset(tmp_path, num_boxes=3)
    for name in ("Cells", "bus", "Buses", "bu", "cell", "red cell", "Red-Cell"):
        data.categories.append({"id": len(data.categories) + 1, "name": name})
    data.annotations[0]["category_id"] = 4
    groups = [[category["name"] for category in group] for group in similar_classes(data)]
    assert groups == [["cell", "cell", "Cells"], ["bus", "Buses"], ["red cell", "Red-Cell"]]
    assert FIXES["classes"][0](data) == 4
    assert [category["name"] for category in data.categories] == ["cell", "Buses", "bu", "red cell"]
    assert [annotation["category_id"] for annotation in data.annotations] == [4, 1, 1]


def test_classes_with_keypoints_in_another_order_are_not_merged(tmp_path):
    data = dataset(tmp_path)
    data.categories[:] = [{"id": 1, "name": "person", "keypoints": ["nose", "tail"]}]
    data.categories.append({"id": 2, "name": "Person", "keypoints": ["tail", "nose"]})
    with pytest.raises(
        DataError, match="'Person' and 'person' are not merged: their keypoints are tail, nose and nose"
    ):
        FIXES["classes"][0](data)
    data.categories[1]["keypoints"] = ["nose", "tail"]
    assert FIXES["classes"][0](data) == 1


def test_unicode_forms_of_a_class_name_are_one_class(tmp_path):
    data = dataset(tmp_path)
    data.categories.extend([{"id": 8, "name": "B\u00e4r"}, {"id": 9, "name": "Ba\u0308r"}])
    assert [[category["id"] for category in group] for group in similar_classes(data)][-1] == [8, 9]


def test_ignored_and_difficult_objects_become_crowd_regions(tmp_path):
    data = dataset(tmp_path, num_boxes=6)
    flags = [{"ignore": 1}, {"difficult": True}, {"ignore": 0}, {"difficult": "0"}, {"ignore": 1, "iscrowd": 1}, {}]
    for annotation, of_object in zip(data.annotations, flags):
        annotation |= of_object
    assert FIXES["ignored"][0](data) == 2
    assert [annotation["iscrowd"] for annotation in data.annotations] == [1, 1, 0, 0, 1, 0]


def test_boxes_without_an_area_are_removed(tmp_path):
    data = dataset(tmp_path, num_boxes=3)
    data.annotations[0]["bbox"] = [5, 5, 0, 4]
    data.annotations[2]["bbox"] = [200, 5, 10, 4]
    assert FIXES["empty"][0](data) == 2 and [annotation["id"] for annotation in data.annotations] == [2]


def correct(data, folder, *entries):
    path = folder / "corrections.json"
    path.write_text(json.dumps(list(entries)))
    return apply_corrections(data, path)


def test_corrections_add_remove_and_change_annotations(tmp_path):
    data = dataset(tmp_path, num_boxes=3)
    data.categories.append({"id": 9, "name": "dirt"})
    done = correct(
        data, tmp_path,
        {"image": "a.png", "action": "remove", "annotation_id": 1, "bbox": None, "category": None},
        {"image": "a.png", "action": "change", "annotation_id": 2, "bbox": [1, 2, 3, 4], "category": "dirt"},
        {"image": "a.png", "action": "add", "annotation_id": None, "bbox": [5, 6, 7, 8], "category": "cell"},
    )  # fmt: skip
    assert done == {"remove": 1, "change": 1, "add": 1}
    assert [(a["id"], a["category_id"]) for a in data.annotations] == [(2, 9), (3, 1), (4, 1)]
    assert data.annotations[0]["bbox"] == [1, 2, 3, 4] and data.annotations[0]["area"] == 12
    assert data.annotations[2]["bbox"] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"image": "z.png", "action": "remove", "annotation_id": 1}, "no image is called 'z.png'"),
        ({"image": "a.png", "action": "remove", "annotation_id": 77}, "has no annotation 77"),
        ({"image": "a.png", "action": "add", "bbox": [1, 2, -3, 4], "category": "cell"}, "expected \\[x, y, width"),
        ({"image": "a.png", "action": "change", "annotation_id": 1, "category": "moon"}, "no class is called 'moon'"),
        ({"image": "a.png", "action": "add", "annotation_id": 1}, "action 'add' with bbox None"),
        ({"image": "a.png", "action": "swap"}, "action 'swap'"),
    ],
)
def test_wrong_correction_is_named(tmp_path, entry, message):
    with pytest.raises(DataError, match=f"corrections.json: correction 1.*{message}"):
        correct(dataset(tmp_path, num_boxes=3), tmp_path, entry)


@pytest.mark.parametrize("ids", [[7, 3, 1], [None, None, None], [3, 3, 3]])
def test_corrections_of_a_copy_with_other_ids_find_the_same_objects(tmp_path, ids):
    data = dataset(tmp_path, num_boxes=3)
    boxes = numbers(data)
    for annotation, number in zip(data.annotations, ids):
        annotation["id"] = number
    image = f"{tmp_path.name}/a.png"  # as a copy names it that was read from the folder above
    entries = [
        {"image": image, "action": action, "annotation_id": k + 1, "bbox": box, "category": None,
         "was": {"bbox": boxes[k], "category": "cell"}}
        for k, action, box in [(0, "change", [1, 2, 3, 4]), (2, "remove", None)]
    ]  # fmt: skip
    assert correct(data, tmp_path, *entries) == {"change": 1, "remove": 1}
    assert numbers(data) == [[1, 2, 3, 4], boxes[1]]
    with pytest.raises(DataError, match=r"correction 1: image .* has no annotation of class 'cell' with bbox \["):
        correct(data, tmp_path, *entries)  # corrected before


@pytest.mark.parametrize("ids", [[1, 1, 3], [1, None, 3]])
def test_corrections_need_ids_that_name_one_annotation_each(tmp_path, ids):
    data = dataset(tmp_path, num_boxes=3)
    for annotation, number in zip(data.annotations, ids):
        annotation["id"] = number
    entry = {"image": "a.png", "action": "remove", "annotation_id": 3}
    with pytest.raises(DataError, match="without an id, or with the same id.*--fix ids"):
        correct(data, tmp_path, entry)
    assert FIXES["ids"][0](data) == 1 and len(data.annotations) == 3
    assert correct(data, tmp_path, entry) == {"remove": 1} and len(data.annotations) == 2
