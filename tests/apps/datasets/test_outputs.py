"""Tools on annotations write below OUT only, completely or not at all."""

import errno
import json
import os
import time

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.merging import merge_datasets, tile_dataset
from vitkit.apps.inference import Tiling
from vitkit.apps.starter.annotation_sheet import draw_sheet
from vitkit.data.formats import read_annotations
from vitkit.io import atomic
from vitkit.tools.data.convert import main as convert
from vitkit.tools.data.merge import main as merge
from vitkit.tools.data.split import main as split
from vitkit.tools.data.tile import main as tile


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with two images, `victim` beside it, and a function that writes COCO annotations of them."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("victim")
    Image.new("RGB", (64, 48)).save("victim/victim.png")
    os.mkdir("data")
    for name in ("a.png", "b.jpg"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)).save(f"data/{name}")

    def write(*names, path="data/own.json", classes=("cell",), **changes):
        content = {
            "images": [{"id": k, "file_name": name, "width": 64, "height": 48} for k, name in enumerate(names, 1)],
            "annotations": [
                {"id": k, "image_id": k, "category_id": 1, "bbox": [4, 4, 20, 20]} | changes
                for k, _ in enumerate(names, 1)
            ],
            "categories": [{"id": k, "name": name} for k, name in enumerate(classes, 1)],
        }
        (tmp_path / path).write_text(json.dumps(content))
        return path

    return write


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


TOOLS = {
    "yolo": lambda path, *more: convert([path, "--images", "data", "--to", "yolo", "--out", "out", *more]),
    "voc": lambda path, *more: convert([path, "--images", "data", "--to", "voc", "--out", "out", *more]),
    "sheet": lambda path, *more: convert([path, "--images", "data", "--to", "coco", "--out", "out.json", *more]),
    "merge": lambda path, *more: merge([f"{path},data", f"{path},data", "--out", "out", *more]),
    "tile": lambda path, *more: tile([path, "--images", "data", "--tiles", "32", "--out", "out", *more]),
    "split": lambda path, *more: split([path, "--images", "data", "--val", "b*", "--out", "out", *more]),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", ["../victim/victim.png", "{cwd}/victim/victim.png", "../../../../etc/hostname"])
def test_files_outside_the_folders_are_neither_read_nor_written(world, tmp_path, tool, name):
    path = world("a.png", name.format(cwd=tmp_path))
    before = snapshot(tmp_path / "victim")
    with pytest.raises(SystemExit, match="lies outside the folder 'data'"):
        TOOLS[tool](path)
    assert snapshot(tmp_path / "victim") == before
    assert not any(file.is_file() for file in tmp_path.glob("out/**/images/**/*"))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", [".", "a.png/", "sub/..", "/"])
def test_names_of_folders_are_no_images(world, tmp_path, tool, name):
    with pytest.raises(SystemExit, match="expected the name of a file"):
        TOOLS[tool](world("b.jpg", name))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["yolo", "voc", "merge", "tile"])
def test_absolute_names_inside_the_folder_are_used(world, tmp_path, tool):
    TOOLS[tool](world("a.png", f"{tmp_path}/data/b.jpg"))
    assert len([file for file in (tmp_path / "out").rglob("*") if file.suffix in (".png", ".jpg")]) > 2


@pytest.mark.parametrize("tool", ["yolo", "voc"])
def test_only_images_are_linked(world, tmp_path, tool):
    (tmp_path / "data/secret.png").write_text("secret")
    with pytest.raises(SystemExit, match="secret.png"):
        TOOLS[tool](world("secret.png"))
    assert not list(tmp_path.glob("out/**/secret.png"))


@pytest.mark.parametrize("tool", ["yolo", "voc", "tile"])
def test_an_image_that_is_listed_twice_is_an_error(world, tool):
    with pytest.raises(SystemExit, match="two images are called 'a.png'|'a.png' is listed twice"):
        TOOLS[tool](world("a.png", "a.png"))


def test_images_whose_tiles_would_have_one_name_are_an_error(world):
    os.link("data/a.png", "data/a.bmp")
    with pytest.raises(SystemExit, match="the tiles of 'a.png' and 'a.bmp' would have one file"):
        TOOLS["tile"](world("a.png", "a.bmp"))


@pytest.mark.parametrize(("tool", "name"), [("voc", "a\x01b"), ("voc", " cell "), ("voc", "a\nb"), ("yolo", "a\nb")])
def test_names_that_a_format_cannot_hold_are_refused_before_writing(world, tmp_path, tool, name):
    with pytest.raises(SystemExit, match="cannot be written in this format|in one line") as stopped:
        TOOLS[tool](world("a.png", classes=[name]))
    assert "\n" not in str(stopped.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["yolo", "voc"])
@pytest.mark.parametrize("classes", [("cell", "cell"), ("cell", "  ")])
def test_classes_that_cannot_be_told_apart_are_refused_before_writing(world, tmp_path, tool, classes):
    with pytest.raises(SystemExit, match="two classes are called 'cell'|'  ' cannot be written in this format"):
        TOOLS[tool](world("a.png", classes=classes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", ["yolo", "voc"])
def test_wrong_sizes_are_found_before_writing(world, tmp_path, tool):
    path = world("a.png", "b.jpg")
    Image.new("RGB", (10, 10)).save(tmp_path / "data/b.jpg")
    with pytest.raises(SystemExit, match="'b.jpg' is 10x10 pixels .* annotated as 64x48"):
        TOOLS[tool](path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["yolo", "voc", "coco"])
def test_merged_and_tiled_images_are_stored_once_and_keep_their_splits(world, tmp_path, to, capsys):
    split([world("a.png", "b.jpg"), "--images", "data", "--val", "0.5", "--to", "yolo", "--out", "splits"])
    before = read_annotations("splits/data.yaml")
    assert sorted(before.splits) == ["train", "val"]
    merge(["splits/data.yaml", "splits/data.yaml", "--to", to, "--out", "merged"])
    tile(["splits/data.yaml", "--tiles", "32", "--to", to, "--out", "tiled"])
    for folder in ("merged", "tiled"):
        after = read_annotations(tmp_path / folder / ("data.yaml" if to == "yolo" else ""), format=to)
        assert sorted(after.splits) == ["train", "val"]
        stored = [file for file in (tmp_path / folder).rglob("*") if file.suffix in (".png", ".jpg")]
        assert len(stored) - 1 == len(after.images)  # and sheet.png
    assert not list(tmp_path.glob("*.tmp"))
    assert "unsupported key" not in capsys.readouterr().err


def test_full_disk_leaves_the_old_file(world, tmp_path, monkeypatch):
    path = world("a.png")
    TOOLS["sheet"](path)
    before = (tmp_path / "out.json").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "replace", full)
    with pytest.raises(SystemExit, match="out.json' cannot be written .No space left on device"):
        convert([path, "--images", "data", "--to", "coco", "--out", "out.json", "--overwrite"])
    assert (tmp_path / "out.json").read_bytes() == before and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("out", ["/proc/out", "/proc/out.json", "data/a.png/out"])
def test_output_that_cannot_be_written_is_an_error_of_one_line(world, out):
    with pytest.raises(SystemExit, match="cannot be written") as stopped:
        convert([world("a.png"), "--images", "data", "--to", "coco", "--out", out])
    assert "\n" not in str(stopped.value)


def test_boxes_far_outside_are_drawn_in_little_time(world):
    TOOLS["sheet"](world("a.png", bbox=[-1e8, -1e8, 2e8, 2e8]))


def test_no_image_is_an_error(world):
    path = world("a.png")
    with pytest.raises(SystemExit, match="has no split 'val'"):
        convert([path, "--images", "data", "--split", "val", "--to", "coco", "--out", "out.json"])


@pytest.mark.parametrize("tool", ["yolo", "voc", "merge", "tile"])
@pytest.mark.parametrize("absolute", [False, True])
def test_linked_images_are_stored_as_images(world, tmp_path, tool, absolute):
    os.symlink(tmp_path / "victim/victim.png" if absolute else "../victim/victim.png", tmp_path / "data/link.png")
    TOOLS[tool](world("link.png"))
    stored = [file for file in (tmp_path / "out").rglob("*.png") if file.name != "sheet.png"]
    assert stored and not any(file.is_symlink() for file in stored)


@pytest.mark.parametrize("inner", ["images", "labels", "JPEGImages", "Annotations"])
@pytest.mark.parametrize("tool", ["yolo", "voc", "merge", "tile"])
def test_links_inside_the_output_are_not_followed(world, tmp_path, tool, inner):
    path = world("a.png")
    os.mkdir("out")
    os.symlink("../victim", tmp_path / "out" / inner)
    before = snapshot(tmp_path / "victim")
    try:
        TOOLS[tool](path, "--overwrite")
    except SystemExit as stopped:
        assert "as a folder in between is a link" in str(stopped)
    assert snapshot(tmp_path / "victim") == before


@pytest.mark.parametrize("name", ["out.json", "out.json.tmp", "out_sheet.png", "out_sheet.png.tmp"])
def test_links_in_place_of_the_output_are_replaced(world, tmp_path, name):
    os.symlink("victim/victim.png", tmp_path / name)
    before = snapshot(tmp_path / "victim")
    convert([world("a.png"), "--images", "data", "--to", "coco", "--out", "out.json", "--overwrite"])
    assert snapshot(tmp_path / "victim") == before
    assert json.loads((tmp_path / "out.json").read_text())["images"]


@pytest.mark.parametrize("tool", TOOLS)
def test_existing_files_are_replaced_only_if_asked(world, tmp_path, tool):
    path = world("a.png", "b.jpg")
    TOOLS[tool](path)
    before = snapshot(tmp_path)
    with pytest.raises(SystemExit, match="exists already. Choose another name, or add --overwrite"):
        TOOLS[tool](path)
    assert snapshot(tmp_path) == before
    TOOLS[tool](path, "--overwrite")


def test_a_sheet_beside_a_json_file_is_not_replaced_unasked(world, tmp_path):
    (tmp_path / "out_sheet.png").write_text("mine")
    with pytest.raises(SystemExit, match="'out_sheet.png' exists already"):
        TOOLS["sheet"](world("a.png"))
    assert (tmp_path / "out_sheet.png").read_text() == "mine" and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("call", "out", "message"),
    [
        (lambda path, out: split([path, "--images", "data", "--val", "0.5", "--out", out]), "s.json", "a folder"),
        (lambda path, out: tile([path, "--images", "data", "--tiles", "32", "--out", out]), "t.JSON", "a folder"),
        (lambda path, out: merge([f"{path},data", f"{path},data", "--out", out]), "m.json", "a folder"),
        (lambda path, out: convert([path, "--images", "data", "--to", "yolo", "--out", out]), "y.json", "a folder"),
        (lambda path, out: convert([path, "--images", "data", "--to", "yolo", "--out", out]), "file", "is a file"),
        (lambda path, out: convert([path, "--images", "data", "--out", out, "--fix", "ids"]), "folder.json", "is a fo"),
    ],
)
def test_a_file_in_place_of_a_folder_is_found_before_any_work(world, tmp_path, capsys, call, out, message):
    path = world("a.png", "b.jpg")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=message):
        call(path, out)
    assert sorted(tmp_path.rglob("*")) == before and not capsys.readouterr().out


@pytest.mark.parametrize("to", ["yolo", "voc"])
def test_boxes_that_extend_beyond_the_image_are_clipped(world, tmp_path, to, capsys):
    TOOLS[to](world("a.png", bbox=[-1000, 4, 1030, 20]))
    assert read_annotations(tmp_path / "out").annotations[0]["bbox"] == [0, 4, 30, 20]
    assert "lost: 1 parts of boxes outside their image: 1" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["yolo", "voc"])
def test_what_reading_back_leaves_out_is_reported_as_lost(world, tmp_path, to, capsys):
    path = world("a.png", "b.jpg")
    folder = tmp_path / "out" / ("labels" if to == "yolo" else "JPEGImages")
    folder.mkdir(parents=True)
    (folder / ("old.txt" if to == "yolo" else "old.png")).write_bytes(
        b"" if to == "yolo" else (tmp_path / "data/a.png").read_bytes()
    )
    TOOLS[to](path, "--overwrite")
    reason = "label files without an image" if to == "yolo" else "images without an XML file"
    assert f"lost: 1 {reason}: old" in capsys.readouterr().out


def test_images_of_a_split_that_yolo_does_not_read_are_reported(world, tmp_path, capsys):
    os.mkdir("parts")
    world("a.png", path="parts/train.json")
    world("b.jpg", path="parts/unusual.json")
    convert(["parts", "--images", "data", "--to", "yolo", "--out", "out"])
    assert "lost: 1 images of the split 'unusual'" in capsys.readouterr().out


def test_an_image_in_two_splits_stays_in_both(world, tmp_path):
    data = read_annotations(world("a.png", "b.jpg"), "data")
    data.splits = {"train": [1, 2], "val": [2]}
    tiled = tile_dataset(data, Tiling(64, 0).tiles, tmp_path / "tiles")
    merged = merge_datasets([data, data], {}, tmp_path / "merged")
    assert {name: len(ids) for name, ids in tiled.splits.items()} == {"train": 2, "val": 1}
    assert {name: len(ids) for name, ids in merged.splits.items()} == {"train": 4, "val": 2}


def test_thousands_of_objects_of_an_image_are_drawn_in_little_time(world, tmp_path):
    path = world("a.png")
    content = json.loads((tmp_path / path).read_text())
    polygon = [[1, 1, 60, 1, 60, 40]]
    content["annotations"] = [
        {"id": k, "image_id": 1, "category_id": 1, "bbox": [1, 1, 60, 40], "segmentation": polygon}
        for k in range(1, 5001)
    ]
    (tmp_path / path).write_text(json.dumps(content))
    data = read_annotations(path, "data")
    began = time.process_time()
    draw_sheet(data, tmp_path / "sheet.png")
    assert time.process_time() - began < 10


def test_source_that_was_converted_into_itself_is_read_as_before(world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path / "data")
    for name, text in (("a", "0 0.5 0.5 0.5 0.5\n"), ("b", "0 0.5 0.5 0.5 0.5\n"), ("classes", "cat\n")):
        (tmp_path / f"data/{name}.txt").write_text(text)
    for options in (["--out", "a.json"], ["--to", "yolo", "--out", "b"], ["--to", "coco", "--out", "c"]):
        convert([".", *options])
        assert ".: YOLO's text files, with data.yaml: 2 images, 2 objects of 1 class" in capsys.readouterr().out
    for out, images in (("a.json", None), ("b", None), ("c", ".")):  # they can still be named
        assert len(read_annotations(out, images).annotations) == 2
