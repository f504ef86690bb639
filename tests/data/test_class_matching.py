"""Classes: val takes those of train by name in every format, and a subset of them can be chosen."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.doctor import diagnose
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.image_folder import ImageFolder
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.data.datasets.video import VideoFolder
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import match_classes
from vitkit.engine.build import build_datasets
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.protocols.dataset import Dataset


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(len(str(path))).integers(0, 255, (20, 40, 3), np.uint8)).save(path)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def coco(path, classes, first_id=1):
    """One image for each class, with one box of it."""
    ids = {name: first_id + k for k, name in enumerate(classes)}
    for name in classes:
        draw(path.parent / f"{name}.png")
    images = [{"id": k, "file_name": f"{name}.png", "width": 40, "height": 20} for k, name in enumerate(classes)]
    square = [[2, 2, 12, 2, 12, 12, 2, 12]]
    annotations = [
        {"id": k, "image_id": k, "category_id": ids[name], "bbox": [2, 2, 10, 10], "segmentation": square}
        for k, name in enumerate(classes)
    ]
    write(
        path,
        {"images": images, "annotations": annotations, "categories": [{"id": i, "name": n} for n, i in ids.items()]},
    )


def labelme(folder, classes):
    for name in classes:
        draw(folder / f"{name}.png")
        shape = {"label": name, "points": [[2, 2], [12, 12]], "shape_type": "rectangle"}
        write(folder / f"{name}.json", {"shapes": [shape], "imageWidth": 40, "imageHeight": 20})


def voc(folder, classes):
    box = "<bndbox><xmin>3</xmin><ymin>3</ymin><xmax>12</xmax><ymax>12</ymax></bndbox>"
    for name in classes:
        draw(folder / f"{name}.png")
        write(folder / f"{name}.xml", f"<annotation><object><name>{name}</name>{box}</object></annotation>")


def table(folder, classes):
    for name in classes:
        draw(folder / f"{name}.png")
    lines = [f"{name}.png,{name},2,2,12,12\n" for name in classes]
    write(folder / "boxes.csv", "file,class,xmin,ymin,xmax,ymax\n" + "".join(lines))


def label_studio(folder, classes):
    tasks = []
    for name in classes:
        draw(folder / f"{name}.png")
        value = {"x": 5, "y": 10, "width": 25, "height": 50, "rectanglelabels": [name]}
        result = [{"type": "rectanglelabels", "value": value}]
        tasks.append({"data": {"image": f"{name}.png"}, "annotations": [{"result": result}]})
    write(folder / "tasks.json", tasks)


def via(folder, classes):
    regions = {}
    for name in classes:
        draw(folder / f"{name}.png")
        shape = {"name": "rect", "x": 2, "y": 2, "width": 10, "height": 10}
        region = {"shape_attributes": shape, "region_attributes": {"class": name}}
        regions[name] = {"filename": f"{name}.png", "regions": [region]}
    write(folder / "via.json", regions)


WRITERS = [labelme, voc, table, label_studio, via, lambda f, names: coco(f / "own.json", names, len(names))]


def labels_of(dataset):
    """The class of the object in each image, by the image's name, which is the class's."""
    names = [Path(dataset.image_path(k)).stem for k in range(len(dataset))]
    return {name: [dataset.classes[k] for k in dataset[i]["target"]["labels"]] for i, name in enumerate(names)}


@pytest.mark.parametrize(
    "write_data", [labelme, voc, table, label_studio, via, lambda f, names: coco(f / "own.json", names, len(names))]
)
def test_val_of_every_format_takes_the_classes_of_train_by_name(tmp_path, write_data):
    train, val = (CocoDetection(*_written(tmp_path / s, write_data, c)) for s, c in (("train", "abc"), ("val", "bc")))
    match_classes(train, val)
    assert val.classes == train.classes == ["a", "b", "c"] and val.category_ids == train.category_ids
    assert labels_of(val) == {"b": ["b"], "c": ["c"]}
    truth = val.ground_truth()
    names = {category["id"]: category["name"] for category in truth["categories"]}
    assert [names[annotation["category_id"]] for annotation in truth["annotations"]] == ["b", "c"]
    assert list(names.values()) == ["a", "b", "c"]
    CocoEvaluator(val)
    with pytest.raises(DataError, match="data.val may lack classes of data.train, but not have others.*data.classes"):
        match_classes(CocoDetection(*_written(tmp_path / "val", write_data, "bc")), train)


def _written(folder, write_data, classes):
    write_data(folder, list(classes))
    return folder, folder / {coco: "own.json", table: "boxes.csv"}.get(write_data, "own.json") if (
        (folder / "own.json").exists()
    ) else (folder / "boxes.csv" if (folder / "boxes.csv").exists() else folder)


def test_names_in_another_form_of_unicode_are_the_same_classes(tmp_path, caplog):
    composed, separate = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    train, val = (
        CocoDetection(*_written(tmp_path / name, WRITERS[-1], classes))
        for name, classes in (("train", [composed, "a"]), ("val", [separate]))
    )
    caplog.set_level("INFO", "vitkit")
    match_classes(train, val)
    assert val.classes == train.classes and "data.val has nothing of 1 class: a" in caplog.text


def test_ids_of_coco_may_differ_between_files(tmp_path):
    coco(tmp_path / "train/own.json", ["a", "b"], 1)
    coco(tmp_path / "val/own.json", ["b", "a"], 7)
    train, val = (CocoDetection(tmp_path / s, tmp_path / s / "own.json", masks=True) for s in ("train", "val"))
    match_classes(train, val)
    assert labels_of(val) == {"a": ["a"], "b": ["b"]} and val.category_ids == [1, 2]
    assert [a["category_id"] for a in val.ground_truth()["annotations"]] == [2, 1]


def test_a_dataset_of_a_users_own_must_list_its_classes_in_the_order_of_train():
    class Own(Dataset):
        def __init__(self, classes, category_ids):
            self.classes, self.category_ids = classes, category_ids

        def __len__(self):
            return 1

        def __getitem__(self, index): ...

    match_classes(Own(["a", "b"], [1, 2]), Own(["a", "b"], [1, 2]))
    with pytest.raises(DataError, match="data.val, Own, lists the classes of data.train in another order: b, a in pla"):
        match_classes(Own(["a", "b"], [1, 2]), Own(["b", "a"], [2, 1]))


@pytest.mark.parametrize("empty_folder", [False, True])
def test_folder_of_classes_may_lack_one_in_val(tmp_path, empty_folder):
    for split, classes in (("train", "abc"), ("val", "bc")):
        for name in classes:
            for k in range(2):
                draw(tmp_path / split / name / f"{k}.png")
    if empty_folder:
        (tmp_path / "val" / "a").mkdir()
    data = DataSettings(**{s: {"type": "ImageFolder", "folder": str(tmp_path / s)} for s in ("train", "val")})
    _, val = build_datasets(data)
    assert val.classes == ["a", "b", "c"] and [val[k]["target"]["label"] for k in range(len(val))] == [1, 1, 2, 2]
    # Later the checkpoint says what the classes are.
    alone = data.evaluation_dataset("val", {"classes": ["a", "b", "c"], "category_ids": ["a", "b", "c"]})
    assert alone.classes == ["a", "b", "c"] and alone.label(0) == 1
    issues = diagnose(
        {"data": {s: {"type": "ImageFolder", "folder": str(tmp_path / s)} for s in ("train", "val")}},
        only=["same_classes"],
    )
    assert [issue.verdict for issue in issues] == ["ok"]


def test_folder_of_videos_may_lack_a_class_in_val(tmp_path):
    for split, classes in (("train", "ab"), ("val", "b")):
        for name in classes:
            draw(tmp_path / split / name / "run" / "0.png")
    train, val = (VideoFolder(tmp_path / split) for split in ("train", "val"))
    match_classes(train, val)
    assert val.classes == ["a", "b"] and val.label(0) == 1


def test_classes_are_chosen(tmp_path):
    coco(tmp_path / "own.json", ["a", "b", "c"])
    spec = {"type": "CocoDetection", "images": str(tmp_path), "annotations": str(tmp_path / "own.json"), "masks": True}
    train, val = build_datasets(DataSettings(train=spec, val=spec, classes=["c", "a"]))
    for dataset in (train, val):
        assert dataset.classes == ["c", "a"] and dataset.num_objects == 2 and dataset.category_ids == [3, 1]
        assert labels_of(dataset) == {"a": ["a"], "b": [], "c": ["c"]}
        assert dataset[2]["target"]["masks"].sum() == 100 and not len(dataset[1]["target"]["masks"])
        assert [a["category_id"] for a in dataset.ground_truth()["annotations"]] == [1, 3]
    with pytest.raises(ConfigError, match="data.classes: data.train has no class 'd'"):
        build_datasets(DataSettings(train=spec, val=spec, classes=["d"]))
    for name in "abc":
        draw(tmp_path / "folders" / name / "0.png")
    folder = {"type": "ImageFolder", "folder": str(tmp_path / "folders")}
    dataset = DataSettings(train=folder, classes=["c", "a"]).dataset("train")
    assert [dataset.image_id(k) for k in range(len(dataset))] == ["a/0.png", "c/0.png"] and dataset.label(0) == 1


def test_chosen_classes_are_matched_in_the_ground_truth_too(tmp_path):
    for name, classes in (("train", "acb"), ("val", "ab")):
        coco(tmp_path / name / "own.json", classes, first_id=3 if name == "val" else 1)
    train, val = (
        {"type": "CocoDetection", "images": str(tmp_path / name), "annotations": str(tmp_path / name / "own.json")}
        for name in ("train", "val")
    )
    _, dataset = build_datasets(DataSettings(train=train, val=val, classes=["c", "a"]))
    assert dataset.classes == ["c", "a"] and dataset.file_ids == {dataset.category_ids[1]: 3}  # the file has no c
    labels = dataset.table.labels.tolist()
    truth = [annotation["category_id"] for annotation in dataset.ground_truth()["annotations"]]
    assert [dataset.category_ids[label] for label in labels] == truth and labels == [1]


def test_pixels_of_other_classes_are_ignored(tmp_path):
    draw(tmp_path / "images" / "0.png")
    (tmp_path / "masks").mkdir()
    Image.fromarray(np.resize(np.array([0, 1, 2], np.uint8), (20, 40))).save(tmp_path / "masks" / "0.png")
    dataset = SemanticFolder(tmp_path / "images", tmp_path / "masks", classes=list("abc"), image_suffix=".png")
    dataset.use_classes(["c", "b"])
    assert dataset.load_semantic(0)[0, :3].tolist() == [255, 1, 0] and dataset.classes == ["c", "b"]


def test_no_class_folder_has_an_image(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="contains no images"):
        ImageFolder(tmp_path)


def test_results_have_the_ids_of_the_file_and_are_read_by_them(tmp_path):
    for name, classes in (("train", "abc"), ("val", "cb")):
        coco(tmp_path / name / "own.json", classes, first_id=3 if name == "val" else 1)
    train, val = (CocoDetection(tmp_path / name, tmp_path / name / "own.json") for name in ("train", "val"))
    match_classes(train, val)
    assert val.category_ids == [1, 2, 3] and val.file_ids == {3: 3, 2: 4}  # c is 3 in the file, and b is 4
    truth = json.loads((tmp_path / "val/own.json").read_text())
    perfect = [{k: a[k] for k in ("image_id", "category_id", "bbox")} | {"score": 0.9} for a in truth["annotations"]]
    write(tmp_path / "perfect.json", perfect)
    evaluator = CocoEvaluator(val)
    evaluator.load_results(tmp_path / "perfect.json")
    assert evaluator.compute()["bbox/AP"] == pytest.approx(1.0)
    evaluator.write_results(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert [entry["category_id"] for entry in again] == [entry["category_id"] for entry in perfect]
    assert [entry["category_id"] for entry in evaluator.results()] == [3, 2]
    write(tmp_path / "wrong.json", [perfect[0] | {"category_id": 1}])
    with pytest.raises(DataError, match="category_id"):
        evaluator.load_results(tmp_path / "wrong.json")
