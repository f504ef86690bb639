"""The doctor recognizes annotations in a wrong format, and the command that it prints repairs them."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit import build_dataset
from vitkit.apps.doctor import DoctorCase, DoctorOptions, run_checks
from vitkit.apps.doctor.training_checks import queries
from vitkit.errors import DataError
from vitkit.io.json_files import read_json
from vitkit.tools.data import convert

WIDTH, HEIGHT = 120, 80


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("photos/a.png")


def write(change=lambda box: box, *, size=(WIDTH, HEIGHT), names=("cell",)):
    """Write an annotation file of 60 boxes, each changed by `change`; return the correct boxes."""
    rng = np.random.default_rng(0)
    boxes = []
    for _ in range(60):
        width, height = rng.integers(4, 40, 2).tolist()
        boxes.append(
            [int(rng.integers(0, WIDTH - width + 1)), int(rng.integers(0, HEIGHT - height + 1)), width, height]
        )
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": size[0], "height": size[1]}],
        "annotations": [
            {"id": k, "image_id": 1, "category_id": 1 + k % len(names), "bbox": change(box), "area": 1, "iscrowd": 0}
            for k, box in enumerate(boxes)
        ],
        "categories": [{"id": k, "name": name} for k, name in enumerate(names, start=1)],
    }
    Path("own.json").write_text(json.dumps(content))
    return boxes


def issues(*checks, **arguments):
    dataset = dict(type="CocoDetection", images="photos", annotations="own.json", **arguments)
    return list(run_checks({"data": {"train": dataset}}, DoctorOptions(), checks=checks or ("annotations",)))


def fixed(issue):
    """Run the command of an issue; return the boxes that it wrote."""
    command = shlex.split(re.search(r"vitkit data convert (.*)", issue.message)[1])
    convert.main(command)
    return json.loads(Path("own_fixed.json").read_text())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]], "two corners"),
        (lambda b: [b[0] + b[2] / 2, b[1] + b[3] / 2, b[2], b[3]], "center and size"),
        (
            lambda b: [b[0] / WIDTH, b[1] / HEIGHT, b[2] / WIDTH, b[3] / HEIGHT],
            "fractions of the image, corner and size",
        ),
        (
            lambda b: [(b[0] + b[2] / 2) / WIDTH, (b[1] + b[3] / 2) / HEIGHT, b[2] / WIDTH, b[3] / HEIGHT],
            "fractions of the image, center and size",
        ),
    ],
)
def test_boxes_in_another_format_are_named_and_fixed(change, what):
    boxes = write(change)
    (issue,) = [issue for issue in issues(bad_boxes="drop") if issue.check == "box format"]
    assert issue.verdict == "fail" and f"seem to be {what}" in issue.message
    assert np.allclose([a["bbox"] for a in fixed(issue)["annotations"]], boxes, atol=2e-3)


@pytest.mark.parametrize("order", ["xyxy", "cxcywh", "fractions"])
def test_convert_says_what_the_doctor_says(order, capsys):
    changes = {
        "xyxy": lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]],
        "cxcywh": lambda b: [b[0] + b[2] / 2, b[1] + b[3] / 2, b[2], b[3]],
        "fractions": lambda b: [b[0] / WIDTH, b[1] / HEIGHT, b[2] / WIDTH, b[3] / HEIGHT],
    }
    write(changes[order])
    (issue,) = [issue for issue in issues(bad_boxes="drop") if issue.check == "box format"]
    convert.main(["own.json", "--images", "photos", "--to", "coco", "--out", "a.json"])
    said = re.search(r"warning: (.*)\. Repair: --fix (\w+)", capsys.readouterr().out)
    assert issue.message.startswith(said[1]) and said[2] == order
    convert.main(["own.json", "--images", "photos", "--to", "coco", "--out", "b.json", "--fix", order])
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("area", [0, 1, WIDTH * HEIGHT])
def test_areas_that_the_boxes_contradict_are_named(area):
    boxes = write()
    content = json.loads(Path("own.json").read_text())
    for annotation in content["annotations"]:
        annotation["area"] = area
    Path("own.json").write_text(json.dumps(content))
    (issue,) = [issue for issue in issues() if issue.check == "area fields"]
    assert (
        issue.verdict == "warn"
        and f"60 of 60 objects have an `area` that their box contradicts, such as {area}" in (issue.message)
    )
    truth = build_dataset(dict(type="CocoDetection", images="photos", annotations="own.json")).ground_truth()
    assert [a["area"] for a in truth["annotations"]] == [width * height for _, _, width, height in boxes]
    for annotation, (x, y, width, height) in zip(content["annotations"], boxes):
        annotation["area"] = width * height / 2
        annotation["segmentation"] = [[x, y, x + width, y, x, y + height]]
    Path("own.json").write_text(json.dumps(content))
    assert not [issue for issue in issues() if issue.check == "area fields"]
    truth = build_dataset(dict(type="CocoDetection", images="photos", annotations="own.json")).ground_truth()
    assert [a["area"] for a in truth["annotations"]] == [width * height / 2 for _, _, width, height in boxes]


def test_correct_boxes_are_not_an_issue():
    write()
    assert not {"box format", "image sizes", "class names"} & {issue.check for issue in issues()}


def test_swapped_sizes_are_named_and_fixed():
    write(size=(HEIGHT, WIDTH))
    (issue,) = [issue for issue in issues(bad_boxes="drop") if issue.check == "image sizes"]
    image = fixed(issue)["images"][0]
    assert (image["width"], image["height"]) == (WIDTH, HEIGHT)
    (unread,) = [issue for issue in issues("images", bad_boxes="drop") if issue.verdict == "fail"]
    assert "Width and height are swapped in the annotations" in unread.message and "EXIF" not in unread.message
    assert "--fix sizes" in unread.message


def test_class_name_variants_are_named_and_merged():
    write(names=("cell", "Cells", "dirt", "dirt"))
    (issue,) = [i for i in issues() if i.check == "class names" and "several ways" in i.message]
    assert "'cell' (id 1) = 'Cells' (id 2), 'dirt' (id 3) = 'dirt' (id 4)" in issue.message
    assert [category["name"] for category in fixed(issue)["categories"]] == ["cell", "dirt"]


def test_dataset_that_cannot_be_built_always_fails():
    Path("labels").mkdir()
    dataset = dict(type="SemanticFolder", images="photos", labels="labels", classes=["road"], image_suffix=".png")
    (issue,) = run_checks({"data": {"train": dataset}}, DoctorOptions(), checks=("images",))
    assert issue.verdict == "fail" and "1 of 1 images have no label image" in issue.message


def test_queries_are_compared_with_the_classes_of_one_image():
    for name, values in (("b", (0, 1)), ("c", (2, 3))):
        Image.open("photos/a.png").save(f"photos/{name}.png")
        Path("labels").mkdir(exist_ok=True)
        labels = np.zeros((HEIGHT, WIDTH), np.uint8) + values[0]
        labels[:10] = values[1]
        Image.fromarray(labels).save(f"labels/{name}.png")
    Path("photos/a.png").unlink()
    dataset = dict(type="SemanticFolder", images="photos", labels="labels", classes=list("abcd"), image_suffix=".png")
    config = {"data": {"train": dataset}, "model": dict(type="Mask2Former", tasks=["semantic"], num_queries=3)}
    (issue,) = queries(DoctorCase(config, DoctorOptions()))
    assert "at most 2 classes in an image, 3 queries" in issue.message and issue.verdict == "ok"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "<annotation></annotation>", "This is XML"),
        ("data.yaml", "names: [cat]", "This is text, not JSON"),
        ("a.txt", "0 0.5 0.5 0.1 0.1", "This is text, not JSON"),
        ("a.json", '{"images": [1, 2', "A truncated download looks like this"),
    ],
)
def test_file_that_is_not_json_is_identified(name, text, message):
    Path(name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_json(name)


def test_other_annotation_formats_are_read():
    Path("photos/a.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    dataset = dict(type="CocoDetection", images="photos", annotations="photos")
    found = list(run_checks({"data": {"train": dataset}}, DoctorOptions(), checks=("annotations",)))
    assert any("1 image, 1 object" in issue.message for issue in found)
    assert not any(issue.verdict == "fail" for issue in found)


def test_frame_distances_between_the_splits_are_reported():
    for split, frames in (("train", range(0, 100, 10)), ("val", (55, 137))):
        for recording in ("day", "night"):
            for frame in frames:
                path = Path(split) / f"{recording}_{frame:04d}.png"
                path.parent.mkdir(exist_ok=True)
                pixels = np.random.default_rng(frame).integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                (Path("labels") / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.zeros((8, 8), np.uint8)).save(Path("labels") / split / path.name)
    data = {
        split: dict(type="SemanticFolder", images=split, labels=f"labels/{split}", classes=["a"], image_suffix=".png")
        for split in ("train", "val")
    }
    found = list(run_checks({"data": data}, DoctorOptions(), checks=("train_val_leakage",)))
    (issue,) = [issue for issue in found if "recordings" in issue.message]
    assert "4 of 4 images of val lie 5 to 47 frames, median 26, from one of train" in issue.message
