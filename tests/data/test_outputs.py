"""Tools on annotations write below OUT only, completely or not at all."""

import errno
import json
import os

import numpy as np
import pytest
from PIL import Image

from vitkit import files
from vitkit.data.formats import read_annotations
from vitkit.tools.convert import main as convert
from vitkit.tools.merge import main as merge
from vitkit.tools.split import main as split
from vitkit.tools.tile import main as tile


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
    "yolo": lambda path: convert([path, "--images", "data", "--to", "yolo", "--out", "out"]),
    "voc": lambda path: convert([path, "--images", "data", "--to", "voc", "--out", "out"]),
    "sheet": lambda path: convert([path, "--images", "data", "--to", "coco", "--out", "out.json"]),
    "merge": lambda path: merge([f"{path},data", f"{path},data", "--out", "out"]),
    "tile": lambda path: tile([path, "--images", "data", "--size", "32", "--out", "out"]),
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


@pytest.mark.parametrize(("tool", "name"), [("voc", "a\x01b"), ("voc", " cell "), ("voc", "a\nb"), ("yolo", "a\nb")])
def test_names_that_a_format_cannot_hold_are_refused_before_writing(world, tmp_path, tool, name):
    with pytest.raises(SystemExit, match="cannot be written in this format|in one line") as stopped:
        TOOLS[tool](world("a.png", classes=[name]))
    assert "\n" not in str(stopped.value) and not (tmp_path / "out").exists()


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
    tile(["splits/data.yaml", "--size", "32", "--to", to, "--out", "tiled"])
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

    monkeypatch.setattr(files.os, "replace", full)
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
