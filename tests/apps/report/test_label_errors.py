"""Labels that a model contradicts, and their corrections."""

import numpy as np
import pytest

from vitkit.apps.report.label_errors import KINDS, corrections, detected_fraction, find_label_errors

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]
WRONG = {"missing": 0, "extra": 1, "class": 2, "box": 3}
"""Kind of error -> the image that has a label with it."""


def data(num_images=12):
    """Images with two objects, of which the model detects all, and one wrong label of each kind."""
    rng = np.random.default_rng(0)
    images = [{"id": 10 + k, "file_name": f"{k}.jpg", "width": 300, "height": 300} for k in range(num_images)]
    annotations, results = [], []

    def label(image, category, box, **more):
        entry = dict(id=len(annotations) + 1, file_id=500 + len(annotations), image_id=10 + image, bbox=box)
        annotations.append({**entry, "category_id": category, "area": box[2] * box[3], "iscrowd": 0, **more})

    for k in range(num_images):
        for n, category in enumerate((3, 7)):
            box = [20.0 + 120 * n, 30.0, 60.0, 60.0]
            near = [x + float(rng.normal(0, 2)) for x in box]
            results.append(dict(image_id=10 + k, category_id=category, bbox=near, score=float(rng.uniform(0.6, 0.9))))
            if n == 0 and k == WRONG["missing"]:
                continue
            if n == 0 and k == WRONG["class"]:
                category = 7
            if n == 0 and k == WRONG["box"]:
                box = [box[0] + 25, box[1] + 10, 60.0, 60.0]
            label(k, category, box)
        for _ in range(8):
            corner = rng.uniform(0, 240, 2).tolist()
            results.append(
                dict(image_id=10 + k, category_id=3, bbox=[*corner, 40.0, 40.0], score=float(0.1 * rng.random()))
            )
    label(WRONG["extra"], 3, [200.0, 200.0, 60.0, 60.0])
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}, results


def test_each_kind_of_label_error_ranks_high_and_is_corrected():
    truth, results = data()
    errors = find_label_errors(truth, results, [3, 7])
    first = {error.kind: error for error in errors[:4]}
    assert {kind: error.image_id - 10 for kind, error in first.items()} == WRONG
    assert all(0 <= error.suspicion <= 1 for error in errors)
    assert [e.suspicion for e in errors] == sorted((e.suspicion for e in errors), reverse=True)
    assert errors[4].suspicion < 0.6 * errors[3].suspicion
    entries = dict(zip(first, corrections(list(first.values()), truth, results)))
    assert entries["missing"]["action"] == "add" and entries["missing"]["annotation_id"] is None
    assert entries["missing"]["category"] == "cat"
    assert entries["missing"]["bbox"] == pytest.approx([20, 30, 60, 60], abs=6)
    extra = entries["extra"]
    assert (extra["action"], extra["bbox"], extra["category"]) == ("remove", None, None)
    assert extra["annotation_id"] == truth["annotations"][-1]["file_id"]
    assert (entries["class"]["action"], entries["class"]["category"], entries["class"]["bbox"]) == (
        "change",
        "cat",
        None,
    )
    assert entries["box"]["category"] is None and entries["box"]["bbox"] == pytest.approx([20, 30, 60, 60], abs=6)
    assert extra["was"] == {"bbox": truth["annotations"][-1]["bbox"], "category": "cat"}
    fields = {"image", "action", "annotation_id", "bbox", "category"}
    assert {kind: entry.keys() - fields for kind, entry in entries.items() if entry["action"] != "add"} == {
        kind: {"was"} for kind in ("extra", "class", "box")
    }
    assert entries["missing"].keys() == fields


def test_images_without_a_file_name_are_named_by_their_id():
    truth, results = data()
    truth["images"] = [{name: image[name] for name in ("id", "width", "height")} for image in truth["images"]]
    errors = find_label_errors(truth, results, [3, 7])
    assert [entry["image"] for entry in corrections(errors, truth, results)] == [str(e.image_id) for e in errors]


def test_crowds_are_never_suspicious():
    truth, results = data()
    truth["annotations"][-1]["iscrowd"] = 1
    errors = find_label_errors(truth, results, [3, 7])
    assert len(truth["annotations"]) - 1 not in {error.annotation for error in errors}


def test_correct_detected_labels_are_not_suspicious():
    truth, results = data()
    errors = find_label_errors(truth, results, [3, 7])
    others = [error for error in errors if error.image_id - 10 not in WRONG.values()]
    assert max((error.suspicion for error in others), default=0) < 0.5


def test_no_label_is_suspicious_without_predictions():
    truth, _ = data()
    assert find_label_errors(truth, [], [3, 7]) == []
    assert find_label_errors({**truth, "annotations": []}, [], [3, 7]) == []
    assert len(KINDS) == 4


def test_extra_boxes_rank_low_if_the_model_misses_many_objects():
    truth, results = data()
    assert detected_fraction(truth, results, [3, 7]) > 0.8
    strong = max(error.suspicion for error in find_label_errors(truth, results, [3, 7]) if error.kind == "extra")
    assert 0.2 < detected_fraction(truth, results[::3], [3, 7]) < 0.5
    weak = [error for error in find_label_errors(truth, results[::3], [3, 7]) if error.kind == "extra"]
    assert max(error.suspicion for error in weak) < 0.5 * strong
    assert detected_fraction(truth, [], [3, 7]) == 0
