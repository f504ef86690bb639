"""convert, split, tile and merge on annotations: what they write and print, and BCCD through YOLO and VOC."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.evaluation.coco import CocoEvaluator
from vitkit.tools.data import convert, merge, split, tile


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_yolo(name, count=4, labels="0 0.5 0.5 0.2 0.2\n1 0.3 0.3 0.1 0.1\n"):
    for k in range(count):
        pixels = np.random.default_rng(k).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        for part in ("images", "labels"):
            Path(name, part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((80, 60), Image.Resampling.BICUBIC).save(f"{name}/images/{k}x.png")
        Path(name, "labels", f"{k}x.txt").write_text(labels)
    Path(name, "data.yaml").write_text("train: images\nnames: [cat, dog]\n")


def test_numbers_before_and_after_are_printed_and_a_sheet_is_drawn(capsys):
    write_yolo("y")
    Path("y/labels/1x.txt").write_text("0 0.5 0.5 0 0.2\n1 0.3 0.3 0.1 0.1\n")
    convert.main(["y/data.yaml", "--to", "voc", "--out", "v"])
    out = capsys.readouterr().out
    assert "4 images (4 train), 8 objects of 2 classes" in out
    assert "lost: 1 boxes without an area" in out
    assert "cat" in out and "4 ->        3" in out
    assert Image.open("v/sheet.png").width > 300
    assert CocoDetection(None, "v").num_objects == 7


def test_numbers_before_a_repair_are_those_of_the_source(capsys):
    write_yolo("y")
    correction = dict(image="images/0x.png", action="add", annotation_id=None, bbox=[1, 2, 9, 9], category="cat")
    Path("corrections.json").write_text(json.dumps([correction]))
    convert.main(["y/data.yaml", "--to", "coco", "--fix", "corrections.json", "--out", "own.json"])
    assert "  cat         4 ->        5\n  dog         4 ->        4\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y", "--to", "official", "--out", "a.pth"], "'official': expected coco, yolo, voc"),
        (["y", "--to", "coco", "--fix", "magic", "--out", "a.json"], "--fix magic: expected fractions"),
        (["y", "more", "--to", "coco", "--out", "a.json"], "unrecognized arguments: more"),
        (["y", "--from", "coc", "--out", "a.json"], "'coc': expected coco, yolo"),
    ],
)
def test_incompatible_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        convert.main(arguments)
    assert message in str(error.value) + capsys.readouterr().err


def test_existing_output_is_not_replaced():
    write_yolo("y")
    Path("a.json").write_text("mine")
    with pytest.raises(SystemExit, match="exists already"):
        convert.main(["y", "--to", "coco", "--out", "a.json"])
    assert Path("a.json").read_text() == "mine"


def test_split_writes_a_file_for_each_split(capsys):
    write_yolo("y", 8)
    split.main(["y", "--val", "0.25", "--test", "3x*", "--out", "s"])
    sizes = {name: len(CocoDetection("y/images", f"s/instances_{name}.json")) for name in ("train", "val", "test")}
    assert sizes == {"train": 5, "val": 2, "test": 1}
    assert "train" in capsys.readouterr().out


def test_split_takes_numbers_of_images():
    write_yolo("y", 8)
    split.main(["y", "--val", "2", "--test", "3", "--out", "s"])
    sizes = {name: len(CocoDetection("y/images", f"s/instances_{name}.json")) for name in ("train", "val", "test")}
    assert sizes == {"train": 3, "val": 2, "test": 3}
    with pytest.raises(SystemExit, match="split: {'val': 8} of 8 images leaves none for training"):
        split.main(["y", "--val", "8", "--out", "t"])
    with pytest.raises(SystemExit, match="got 1.5; expected a fraction between 0 and 1, or a number of images"):
        split.main(["y", "--val", "1.5", "--out", "t"])


def test_damaged_image_is_in_no_split_and_not_on_the_sheet(capsys):
    write_yolo("y", 8)
    convert.main(["y/data.yaml", "--to", "coco", "--out", "own.json"])
    Path("y/images/0x.png").write_bytes(b"")
    split.main(["own.json", "--images", "y", "--val", "0.25", "--out", "s"])
    sizes = [len(CocoDetection("y", f"s/instances_{name}.json")) for name in ("train", "val")]
    assert sum(sizes) == 7 and Path("s/sheet.png").is_file()
    assert "left out: 1 images whose file cannot be read: images: cannot decode 'y/images/0x.png'" in (
        capsys.readouterr().out
    )


def test_split_of_label_images_writes_names_that_the_dataset_reads(capsys):
    write_yolo("y", 6)
    Path("masks").mkdir()
    for k in range(6):
        Image.fromarray(np.full((60, 80), k % 2, np.uint8)).save(f"masks/{k}x.png")
    Path("masks/classes.txt").write_text("ground\nroad\n")
    split.main(["masks", "--images", "y/images", "--val", "0.34", "--out", "s"])
    sets = [
        SemanticFolder("y/images", "masks", classes="masks/classes.txt", image_suffix=".png", names=f"s/{name}.txt")
        for name in ("train", "val")
    ]
    assert [len(dataset) for dataset in sets] == [4, 2] and sets[0].classes == ["ground", "road"]
    assert not set(sets[0].image_ids) & set(sets[1].image_ids)
    assert "data.val.names=s/val.txt" in capsys.readouterr().out


def test_merge_renames_classes(capsys):
    write_yolo("a", 2)
    write_yolo("b", 1)
    merge.main(["a/data.yaml", "b/labels,b/images", "--map", "dog=cat", "--out", "m"])
    dataset = CocoDetection("m/images", "m/instances.json")
    assert dataset.classes == ["cat"] and len(dataset) == 3 and dataset.num_objects == 6
    with pytest.raises(SystemExit, match="expected CLASS=NAME"):
        merge.main(["a", "b", "--map", "dog", "--out", "m2"])
    with pytest.raises(SystemExit, match=r"images: no folder 'nowhere'.* Images that lie elsewhere: FILE,DIR for the"):
        merge.main(["a/data.yaml", "b/labels,nowhere", "--out", "m3"])


def test_tile_writes_tiles_in_any_format(capsys):
    write_yolo("a", 1)
    tile.main(["a", "--tiles", "40", "--tile-overlap", "0", "--to", "yolo", "--out", "t"])
    printed = capsys.readouterr()
    assert len(list(Path("t/labels").rglob("*.txt"))) == 4 and "tiles" not in printed.err
    assert "cat         1 ->        4\n" in printed.out  # it lies in the center, so in four tiles
    assert {Image.open(path).size for path in Path("t/images/all").iterdir()} == {(40, 40)}


@pytest.mark.parametrize("high", [255, 65535])
def test_tiles_keep_all_channels_and_bits(high, capsys):
    image = np.random.default_rng(0).integers(0, high + 1, (40, 80, 5), dtype=np.uint8 if high == 255 else np.uint16)
    np.save("a.npy", image)
    info = dict(id=1, file_name="a.npy", width=80, height=40)
    box = dict(id=1, image_id=1, category_id=1, bbox=[30, 10, 20, 20], area=400, iscrowd=0)
    Path("a.json").write_text(json.dumps(dict(images=[info], annotations=[box], categories=[dict(id=1, name="roof")])))
    command = ["a.json", "--images", ".", "--tiles", "40", "--tile-overlap", "0", "--out", "t"]
    tile.main([*command, "--channels", "5"])
    for name, expected in (("a_0_0", image[:, :40]), ("a_40_0", image[:, 40:])):
        stored = np.load(f"t/images/{name}.npy")
        assert stored.dtype == image.dtype and np.array_equal(stored, expected)
    assert Image.open("t/sheet.png").width > 100 and "roof         1 ->        2\n" in capsys.readouterr().out
    split.main(["t", "--val", "0.5", "--out", "s"])
    assert "s: COCO's JSON of boxes: 2 images (1 train, 1 val)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="t/images/a_0_0.npy' is a NumPy array; only images of data.channels=N"):
        convert.main(["t", "--to", "yolo", "--out", "y"])
    with pytest.raises(SystemExit, match="2"):
        tile.main([*command, "--channels", "5", "--to", "yolo"])
    assert "--channels writes .npy files, which --to yolo does not have" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"a\.npy': has 5 channels \(height 40, width 80\); expected 4"):
        tile.main([*command, "--channels", "4", "--overwrite"])


def test_bccd_survives_conversion_to_yolo_and_voc(shared_data):
    """The same boxes, and the same evaluation of one set of predictions."""
    bccd = shared_data / "bccd"
    content = json.loads((bccd / "annotations/instances_val.json").read_text())
    content["images"] = content["images"][:20]
    ids = {image["id"] for image in content["images"]}
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] in ids]
    Path("bccd.json").write_text(json.dumps(content))
    convert.main(["bccd.json", "--images", str(bccd / "images"), "--to", "yolo", "--out", "y"])
    convert.main(["y", "--to", "voc", "--out", "v"])
    names = {category["id"]: category["name"] for category in content["categories"]}
    files = {image["id"]: image["file_name"] for image in content["images"]}
    rng = np.random.default_rng(0)
    predictions = [
        (files[a["image_id"]], names[a["category_id"]], (np.array(a["bbox"]) + rng.normal(0, 4, 4)).clip(0.5).tolist())
        for a in content["annotations"]
    ]
    found = []
    for dataset in (CocoDetection(bccd / "images", "bccd.json"), CocoDetection(None, "y"), CocoDetection(None, "v")):
        truth = dataset.ground_truth()
        image_ids = {Path(image["file_name"]).name: image["id"] for image in truth["images"]}
        category_ids = {category["name"]: category["id"] for category in truth["categories"]}
        results = [
            {"image_id": image_ids[file], "category_id": category_ids[name], "bbox": box, "score": 1 - k / 1e4}
            for k, (file, name, box) in enumerate(predictions)
        ]
        Path("results.json").write_text(json.dumps(results))
        evaluator = CocoEvaluator(dataset=dataset, iou_types=["bbox"])
        evaluator.load_results(Path("results.json"))
        file_of = {number: name for name, number in image_ids.items()}
        name_of = {number: name for name, number in category_ids.items()}
        boxes = [(file_of[a["image_id"]], name_of[a["category_id"]], *a["bbox"]) for a in truth["annotations"]]
        found.append((sorted(boxes), evaluator.compute()))
    assert found[0] == found[1] == found[2] and 0.3 < found[0][1]["bbox/AP"] < 1


def test_earlier_split_is_not_overwritten():
    write_yolo("y", count=8)
    split.main(["y/data.yaml", "--val", "0.25", "--to", "yolo", "--out", "parts"])
    with pytest.raises(SystemExit, match="--out parts: 'parts/[a-z.]+' exists already"):
        split.main(["y/data.yaml", "--val", "0.25", "--seed", "1", "--to", "yolo", "--out", "parts"])


def test_images_without_a_split_are_counted_as_lost(capsys):
    write_yolo("y")
    convert.main(["y/data.yaml", "--to", "voc", "--out", "v"])
    Path("v/ImageSets/Main/train.txt").write_text("0x\n1x\n2x\n")
    capsys.readouterr()
    convert.main(["v", "--to", "yolo", "--out", "back"])
    assert "lost: 1 images that are in no split: 3x.png" in capsys.readouterr().out
