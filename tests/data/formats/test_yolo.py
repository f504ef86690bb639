"""YOLO's text files: layouts, lists, poses, polygons, labels without an image."""

import numpy as np
import pytest
from helpers.annotation_files import boxes, draw, draw_images, named_boxes, write, yolo

from vitkit.data.formats import read_annotations
from vitkit.errors import DataError


def test_yolo_is_read_from_the_layout_of_ultralytics(tmp_path):
    draw_images(tmp_path, "images/train/a.jpg", "images/train/empty.jpg", "images/val/b.jpg")
    write(tmp_path / "labels/train/a.txt", "1 0.5 0.5 0.5 0.2\n0 0 0 0.5 0 0.5 0.5\n")
    write(tmp_path / "labels/val/b.txt", "0 0.1 0.1 0.1 0.1\n")
    write(tmp_path / "data.yaml", "path: /elsewhere\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n")
    for data in (read_annotations(tmp_path / "data.yaml"), read_annotations(tmp_path)):
        assert data.format == "yolo" and {k: len(ids) for k, ids in data.splits.items()} == {"train": 2, "val": 1}
        assert [(name, box) for _, name, box in named_boxes(data)] == [
            ("dog", [10, 8, 20, 4]),
            ("cat", [0, 0, 20, 10]),
            ("cat", [2, 1, 4, 2]),
        ]
        assert data.annotations[1]["segmentation"] == [[0, 0, 20, 0, 20, 10]] and data.annotations[1]["area"] == 100


def test_yolo_is_read_from_the_layout_of_roboflow(tmp_path):
    draw_images(tmp_path, "train/images/a.jpg", "valid/images/b.jpg")
    write(tmp_path / "train/labels/a.txt", "0 0.5 0.5 1 1\n")
    write(tmp_path / "data.yaml", "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnames: [cat]\n")
    data = read_annotations(tmp_path / "data.yaml")
    assert named_boxes(data) == [("train/images/a.jpg", "cat", [0, 0, 40, 20])]
    assert list(data.splits) == ["train", "val"] and "test" in data.notes[0]


@pytest.mark.parametrize("source", ["data.yaml", "labels"])
def test_labels_of_yolo_are_found_in_another_case_and_counted_without_an_image(tmp_path, source):
    draw_images(tmp_path / "images", "A.jpg", "B.jpg", "C.jpg", "other.jpg")
    for name in ("A.txt", "b.txt", "C.TXT", "d.txt", "E.TXT", "other.txt"):
        write(tmp_path / "labels" / name, "0 0.5 0.5 0.5 0.5\n")
    for name, text in {"README.txt": "cat\n", "classes.txt": "cat\n", "._A.txt": "cat\n", "empty.txt": ""}.items():
        write(tmp_path / "labels" / name, text)
    write(tmp_path / "train.txt", "".join(f"images/{name}.jpg\n" for name in "ABC"))
    write(tmp_path / "data.yaml", "train: train.txt\nnames: [cat]\n")
    data = read_annotations(tmp_path / source)
    names = ["A.jpg", "B.jpg", "C.jpg", *["other.jpg"] * (source == "labels")]
    assert [name.removeprefix("images/") for name, _, _ in named_boxes(data)] == names
    unnamed = {"images that data.yaml does not name": ["images/other.jpg"]} if source == "data.yaml" else {}
    assert data.left_out == unnamed | {"label files without an image": ["E.TXT", "d.txt", "empty.txt"]}


def test_yolo_lists_with_paths_of_another_machine_are_resolved(tmp_path):
    draw_images(tmp_path / "images", "train/a.jpg", "val/a.jpg")
    for split in ("train", "val"):
        write(tmp_path / f"labels/{split}/a.txt", "0 0.5 0.5 0.5 0.5\n")
        write(tmp_path / f"{split}.txt", f"/home/other/cells/images/{split}/a.jpg\n")
    write(tmp_path / "data.yaml", "names: [cell]\ntrain: train.txt\nval: val.txt\n")
    data = read_annotations(tmp_path / "data.yaml")
    names = {split: data.images[ids[0] - 1]["file_name"] for split, ids in data.splits.items()}
    assert names == {"train": "images/train/a.jpg", "val": "images/val/a.jpg"}


def test_yolo_is_read_from_one_folder_without_class_names(tmp_path):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "a.txt", "2 0.5 0.5 0.1 0.1\n2 0.5 0.5 0.1 0.1\n")
    data = read_annotations(tmp_path)
    assert named_boxes(data) == [("a.jpg", "class_2", [18, 9, 4, 2])]
    assert data.left_out == {"duplicate lines": ["a.txt line 2"]}
    assert "data.yaml" in data.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 10 20 30 40", "not a fraction of the image. Are these pixels"),
        ("0 0.1 0.1 0.1", "got 3 numbers after the class"),
        ("0 0.1 0.1 -0.1 0.1", "a size is negative"),
        ("7 0.1 0.1 0.1 0.1", "no class is numbered 7"),
        ("cat 0.1 0.1 0.1 0.1", "expected a class number"),
        ("0 0.1 nan 0.1 0.1", "expected `CLASS CX CY W H`"),
    ],
)
def test_wrong_line_of_yolo_is_named(tmp_path, line, message):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "classes.txt", "cat\n")
    write(tmp_path / "a.txt", f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(DataError, match=message) as error:
        read_annotations(tmp_path, format="yolo")
    assert "a.txt' line 2" in str(error.value)


def test_missing_yolo_label_files_are_not_taken_for_empty_images(tmp_path):
    draw_images(tmp_path / "images", "a.png", "b.png")
    write(tmp_path / "annotations/a.txt", "0 0.5 0.5 0.1 0.1\n")
    write(tmp_path / "data.yaml", "train: images\nnames: [cat]\n")
    with pytest.raises(DataError, match="data.yaml: no image has a label file"):
        read_annotations(tmp_path / "data.yaml")


def test_yolo_reports_training_images_in_the_test_split(tmp_path):
    draw_images(tmp_path / "images", "train/a.png", "val/b.png")
    write(tmp_path / "labels/train/a.txt", "0 0.5 0.5 0.1 0.1\n")
    write(tmp_path / "data.yaml", "train: images/train\nval: images/val\ntest: images/train\nnames: [cat]\n")
    notes = read_annotations(tmp_path / "data.yaml").notes
    assert notes == ["no image of val has an object", "1 image is in both train and test, such as images/train/a.png"]


def yolo_folder(root, *names):
    """Images with a text file each."""
    for name in names:
        draw_images(root / "images", name)
        write(root / "labels" / f"{name.rpartition('.')[0]}.txt", "0 0.5 0.5 0.5 0.5\n")


def splits_of(data):
    names = {image["id"]: image["file_name"] for image in data.images}
    return {split: [names[number] for number in ids] for split, ids in data.splits.items()}


def test_yaml_of_the_dataset_beside_it_names_the_classes(tmp_path):
    for name in ("cats", "dogs"):
        yolo_folder(tmp_path / name, "a.jpg")
        write(tmp_path / f"{name}.yaml", f"path: {name}\ntrain: images\nval: images\nnames: [{name[:-1]}]\n")
    assert [name for _, name, _ in named_boxes(read_annotations(tmp_path / "dogs"))] == ["dog"]
    (tmp_path / "dogs.yaml").unlink()
    assert [name for _, name, _ in named_boxes(read_annotations(tmp_path / "dogs"))] == ["class_0"]
    for name in ("one", "other"):
        write(tmp_path / f"dogs/{name}.yaml", f"names: [{name}]\n")
    with pytest.raises(DataError, match="one.yaml, other.yaml in .* name other classes"):
        read_annotations(tmp_path / "dogs")


@pytest.mark.parametrize("lists", [False, True])
def test_splits_of_a_folder_are_those_of_its_yaml(tmp_path, lists):
    yolo_folder(tmp_path, "setA/a.jpg", "setB/b.jpg")
    draw_images(tmp_path / "images", "more/c.jpg")
    entries = {"train": "images/setA", "val": "images/setB"}
    if lists:
        for split, name in (("train", "setA/a"), ("val", "setB/b")):
            write(tmp_path / f"{split}.txt", f"./images/{name}.jpg\n")
        entries = {"train": "train.txt", "val": "val.txt"}
    write(tmp_path / "data.yaml", "names: [a]\n" + "".join(f"{key}: {value}\n" for key, value in entries.items()))
    data = read_annotations(tmp_path)
    assert splits_of(data) == {"train": ["setA/a.jpg"], "val": ["setB/b.jpg"]} and len(data.images) == 3
    write(tmp_path / "data.yaml", "names: [a]\ntrain: images/setA\nval: images/setA\n")  # as YOLO needs both
    assert not read_annotations(tmp_path).splits
    write(tmp_path / "data.yaml", "names: [a]\ntrain: images/none\nval: images/setB\n")
    data = read_annotations(tmp_path)
    assert not data.splits and any("the splits of data.yaml are not read: " in note for note in data.notes)


def test_the_folder_of_one_split_has_the_classes_of_the_yaml_above(tmp_path):
    for split in ("train", "valid"):
        draw_images(tmp_path, f"{split}/images/a.jpg")
        write(tmp_path / split / "labels/a.txt", "0 0.5 0.5 0.5 0.5\n")
    write(tmp_path / "data.yaml", "train: ../train/images\nval: ../valid/images\nnames: [cell]\n")
    for split in ("train", "valid"):
        assert named_boxes(read_annotations(tmp_path / split))[0][1] == "cell"
    write(tmp_path / "copy.yaml", "names: {0: cell}\n")  # the same in another form
    assert named_boxes(read_annotations(tmp_path))[0][1] == "cell"


def test_the_splits_of_a_yaml_are_read_with_the_folder_of_the_images_too(tmp_path):
    yolo_folder(tmp_path, "setA/a.jpg", "setB/b.jpg")
    write(tmp_path / "data.yaml", "train: images/setA\nval: images/setB\nnames: [a]\n")
    for images, start in ((tmp_path, "images/"), (tmp_path / "images", "")):
        data = read_annotations(tmp_path, images)
        assert splits_of(data) == {"train": [f"{start}setA/a.jpg"], "val": [f"{start}setB/b.jpg"]}


@pytest.mark.parametrize("text", ["", "cat\n\ndog\n", "0 0.5 0.5 0.5 0.5\n"])
def test_what_is_no_file_of_class_names_beside_the_text_files_is_passed_over(tmp_path, text):
    yolo_folder(tmp_path, "train/a.jpg")
    write(tmp_path / "labels/train/labels.txt", text)
    assert {name for _, name, _ in named_boxes(read_annotations(tmp_path))} == {"class_0"}


def test_images_beside_the_folder_of_one_split_are_not_lost(tmp_path):
    yolo_folder(tmp_path, "a.jpg", "b.jpg", "test/c.jpg")
    data = read_annotations(tmp_path)
    assert not data.splits and len(data.split(None).images) == 3


def test_a_folder_beside_those_of_the_splits_is_in_none(tmp_path):
    yolo_folder(tmp_path, "train/a.jpg", "val/b.jpg", "extra/c.jpg")
    data = read_annotations(tmp_path)
    assert splits_of(data) == {"train": ["train/a.jpg"], "val": ["val/b.jpg"]} and len(data.annotations) == 3


def test_a_path_that_leads_out_of_the_folder_is_named(tmp_path):
    yolo_folder(tmp_path / "proj", "a.jpg")
    write(tmp_path / "proj/data.yaml", "path: ../real\ntrain: images\nval: images\nnames: [a]\n")
    notes = read_annotations(tmp_path / "proj/data.yaml").notes
    assert any("path: '../real' leads out of" in note for note in notes)


def test_class_names_beside_the_text_files_of_each_split_are_read_if_they_agree(tmp_path):
    yolo_folder(tmp_path, "day1/a.jpg", "day2/b.jpg")
    for day in (1, 2):
        write(tmp_path / f"labels/day{day}/classes.txt", "dog\ncat\n")
    assert {name for _, name, _ in named_boxes(read_annotations(tmp_path))} == {"dog"}
    write(tmp_path / "labels/day2/classes.txt", "cat\ndog\n")
    with pytest.raises(DataError, match="classes.txt' and .*classes.txt' name other classes"):
        read_annotations(tmp_path)


def test_text_file_of_two_images_is_an_error(tmp_path):
    draw_images(tmp_path / "images", "dogs/1.jpg", "others/1.jpg")
    write(tmp_path / "labels/1.txt", "0 0.5 0.5 0.2 0.2")
    with pytest.raises(DataError, match=r"1\.txt' is the only text file of two images, dogs/1\.jpg and others/1\.jpg"):
        read_annotations(tmp_path / "labels", tmp_path / "images")


FLAGGED = "0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1 0.6 0.6 2"


@pytest.mark.parametrize(
    "lines",
    [
        [FLAGGED],  # 16 numbers, an even count
        ["0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1"],  # 13
        [
            "0.5 0.5 0.5 0.5 0.4 0.4 0.6 0.6 0.5 0.45",
            "0.4 0.4 0.2 0.2 0.4 0.4 0.45 0.45 0 0",
            "0.5 0.3 0.2 0.4 0.5 0.3 0.5 0.2 0.5 0.4",
        ],
    ],
)
def test_poses_without_kpt_shape_are_boxes(tmp_path, lines):
    data = read_annotations(yolo(tmp_path, *lines))
    expected = []
    for line in lines:
        x, y, w, h = map(float, line.split()[:4])
        expected.append([(x - w / 2) * 40, (y - h / 2) * 20, w * 40, h * 20])
    assert np.allclose(boxes(data), expected, atol=1e-3) and not any("segmentation" in a for a in data.annotations)
    reason = "poses, although no kpt_shape says so, of which only the box is read"
    assert len(data.left_out[reason]) == len(lines)


def test_poses_that_do_not_fit_kpt_shape_are_an_error(tmp_path):
    pose = ".5 .5 .4 .4 .4 .4 2 .6 .6 2 .5 .5 2 .45 .45 1"
    path = yolo(tmp_path, pose, ".5 .5 .4 .4", ".5 .5 .4 .4 0.9")
    path.write_text(path.read_text() + "kpt_shape: [4, 3]\n")
    assert boxes(read_annotations(path)) == [[12, 6, 16, 8]] * 3
    for line, count in ((".5 .5 .4 .4 .4 .4 .6 .6 .5 .5 .45 .45", 12), (f"{pose} 0.9", 17)):
        write(tmp_path / "labels" / "a.txt", f"0 {pose}\n0 {line}\n")
        with pytest.raises(DataError, match=rf"line 2: .*: got {count} numbers .*kpt_shape \[4, 3\] needs 16\."):
            read_annotations(path)


def test_polygons_are_not_taken_for_poses(tmp_path):
    corners = "0.9 0.9 0.95 0.9 0.95 0.95 0.9 0.95"  # a turned box near the far corner
    five = "0.1 0.1 0.5 0.1 0.6 0.3 0.5 0.5 0.1 0.5"
    for lines in ([corners] * 1, [five, five.replace("0.6", "0.7"), five.replace("0.6", "0.8")]):
        data = read_annotations(yolo(tmp_path, *lines))
        assert all(annotation["segmentation"] for annotation in data.annotations) and not data.left_out
    with pytest.raises(DataError, match=r"line 2.*13 numbers are not a polygon.*add kpt_shape to data.yaml if it is"):
        read_annotations(yolo(tmp_path, five, "0.5 0.5 0.5 0.5 0.4 0.4 2 0 0 0 0.7 0.6 1"))
    with pytest.raises(DataError, match="the fifth number 45 is not a confidence.*angle of a turned box"):
        read_annotations(yolo(tmp_path, "0.5 0.5 0.5 0.5 45"))


@pytest.mark.parametrize("corners", [5, 6, 8, 32])
@pytest.mark.parametrize("radius", [0.02, 0.1, 0.2])
def test_polygons_with_equally_many_corners_are_no_poses(tmp_path, corners, radius):
    angles = np.arange(corners) / corners * 2 * np.pi
    around = radius * np.stack([np.cos(angles), 1.2 * np.sin(angles)], axis=1)
    centers = np.random.default_rng(0).uniform(0.3, 0.7, (40, 2))
    lines = [" ".join(f"{value:.6f}" for value in (center + around).ravel()) for center in centers]
    data = read_annotations(yolo(tmp_path, *lines))
    assert all(annotation["segmentation"] for annotation in data.annotations) and not data.left_out
    lowest, sides = around.min(axis=0), around.max(axis=0) - around.min(axis=0)
    read_annotations(yolo(tmp_path, *["0 0 0 0 0 0 0 0 0 0"] * 3))  # no polygon, and no error
    expected = np.concatenate([centers + lowest, np.broadcast_to(sides, (40, 2))], axis=1) * [40, 20, 40, 20]
    assert np.allclose(boxes(data), expected, atol=0.02)


def test_subsets_of_cvats_yolo_are_splits(tmp_path):
    for subset, count in (("Train", 4), ("Validation", 2)):
        for k in range(count):
            draw(tmp_path / f"obj_{subset}_data/{subset}{k}.png")
            write(tmp_path / f"obj_{subset}_data/{subset}{k}.txt", "0 0.375 0.5 0.25 0.5\n")
        listed = [f"data/obj_{subset}_data/{subset}{k}.png\n" for k in range(count)]
        write(tmp_path / f"{subset}.txt", "".join(listed))
    write(tmp_path / "obj.names", "box\n")
    lines = [
        "classes = 1",
        "Train = data/Train.txt",
        "Validation = data/Validation.txt",
        "names = data/obj.names",
        "backup = backup/",
    ]
    write(tmp_path / "obj.data", "\n".join(lines))
    for source in (tmp_path, tmp_path / "obj.data"):
        data = read_annotations(source)
        assert {name: len(ids) for name, ids in data.splits.items()} == {"train": 4, "val": 2}
        assert boxes(data) == [[10, 5, 10, 10]] * 6 and not data.left_out and data.categories[0]["name"] == "box"


@pytest.mark.parametrize(("text", "line"), [("cat\n\ndog\n", 2), ("\ncat\ndog\n", 1), ("cat\n#7up\nfanta\n\n", None)])
def test_numbers_of_classes_are_those_of_their_lines(tmp_path, text, line):
    draw_images(tmp_path, "a.jpg")
    write(tmp_path / "a.txt", "1 0.5 0.5 0.2 0.2\n")
    write(tmp_path / "classes.txt", text)
    if line is None:
        assert [name for _, name, _ in named_boxes(read_annotations(tmp_path, format="yolo"))] == ["#7up"]
        return
    with pytest.raises(DataError, match=f"classes.txt': line {line} is blank, and names of classes follow"):
        read_annotations(tmp_path, format="yolo")


def test_confidences_are_counted_and_empty_files_and_byte_order_marks_do_not_hide_the_format(tmp_path):
    draw_images(tmp_path, *(f"{k:02}.jpg" for k in range(60)))
    for k in range(59):
        write(tmp_path / f"{k:02}.txt", "")
    (tmp_path / "59.txt").write_text("0 0.5 0.5 0.2 0.2 0.9", encoding="utf-8-sig")
    data = read_annotations(tmp_path)
    assert data.format == "yolo" and boxes(data) == [[16, 8, 8, 4]]
    assert len(data.left_out["fifth numbers of lines, taken as confidences"]) == 1
