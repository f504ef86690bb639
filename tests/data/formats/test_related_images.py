"""Tiles of a photo and frames of a video, which stay in one split."""

from pathlib import Path

import pytest
from helpers.annotation_files import draw, write

from vitkit.apps.datasets.image_groups import photo_names, series_of
from vitkit.apps.datasets.merging import tile_dataset
from vitkit.apps.datasets.splitting import split_dataset
from vitkit.apps.inference import Tiling
from vitkit.data.formats import AnnotatedImages, read_annotations


def test_tiles_of_a_photo_stay_together(tmp_path):
    photos = AnnotatedImages("coco", tmp_path / "own.json", tmp_path)
    for k in range(8):
        draw(tmp_path / f"photo {k}.png", (96, 64), seed=k)
        photos.add_object(photos.add_image(f"photo {k}.png", 96, 64), "cat", [1, 1, 90, 60])
    tiled = tile_dataset(photos, Tiling(32, 0).tiles, tmp_path / "tiles", min_visible=0.01)
    assert len(tiled.images) == 48
    split_dataset(tiled, {"val": 0.25})
    parts = {name: {Path(i["file_name"]).name[:7] for i in tiled.split(name).images} for name in tiled.splits}
    assert len(parts["val"]) == 2 and not parts["train"] & parts["val"]
    assert "tiles of 8 photos by their file names: those of one stay together" in tiled.notes


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a_0_0", "a_512_0", "b_0_0", "b_0_600"], ["a", "a", "b", "b"]),
        (["a_0_0", "a_1_0", "b_0_0"], ["a", "a", "b"]),  # an image one pixel wider than a tile
        (["IMG_20231105_120000", "IMG_20231105_120003", "x_0_0"], None),
        ([f"cam_0_{k}" for k in range(9)], None),
        (["a_1_2", "a_1_3"], None),
        (["a_0_0", "a_512_0"], None),  # of a single photo, which must be divided
        (["rec_0007_0001", "b_00_01"], None),
    ],
)
def test_tiles_are_recognized_by_their_names(names, expected):
    found = [str(photo).removesuffix(".png") for photo in photo_names([f"{name}.png" for name in names])]
    assert found == (expected or names)


def test_frames_of_a_video_of_cvat_are_cut_into_blocks(tmp_path):
    names = [f"frame_{k:06}.png" for k in range(40)]
    assert series_of(names) == ["frame_"] * 40 and series_of([f"IMG_{k:04}.png" for k in range(40)]) is None
    data = AnnotatedImages("coco", tmp_path / "own.json", tmp_path)
    for k, name in enumerate(names):
        draw(tmp_path / name, seed=k)
        data.add_object(data.add_image(name, 40, 20), "cat", [1, 1, 9, 9])
    split_dataset(data, {"val": 0.2})
    assert {(image_id - 1) // 4 for image_id in data.splits["val"]} == {(k - 1) // 4 for k in data.splits["val"]}
    assert len({(image_id - 1) // 4 for image_id in data.splits["val"]}) == 2


@pytest.mark.parametrize("kind", ["cvat tasks", "cvat subsets", "coco subsets", "yolo subsets"])
def test_tasks_and_subsets_of_cvat_stay_together(tmp_path, kind):
    names = [f"{part}_{k}.png" for part in ("one", "two", "six", "ten") for k in "abcde"]
    for k, name in enumerate(names):
        draw(tmp_path / "images" / name, seed=k)
    if kind.startswith("cvat"):
        shape = '<box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"/>'
        part = 'subset="{}"' if kind == "cvat subsets" else 'task_id="{}"'
        images = [f'<image name="{n}" width="40" height="20" {part.format(n[:3])}>{shape}</image>' for n in names]
        source = write(tmp_path / "a.xml", f"<annotations>{''.join(images)}</annotations>")
    elif kind.startswith("coco"):
        source = tmp_path / "annotations"
        for part in ("one", "two", "six", "ten"):
            images = [
                {"id": k, "file_name": n, "width": 40, "height": 20} for k, n in enumerate(names) if n[:3] == part
            ]
            content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
            write(source / f"instances_{part}.json", content)
    else:
        write(tmp_path / "obj.names", "cat\n")
        write(
            tmp_path / "obj.data",
            "classes = 1\nnames = data/obj.names\n"
            + "".join(f"{p} = data/{p}.txt\n" for p in ("one", "two", "six", "ten")),
        )
        for part in ("one", "two", "six", "ten"):
            write(tmp_path / f"{part}.txt", "".join(f"data/images/{n}\n" for n in names if n[:3] == part))
        for name in names:
            write(tmp_path / "images" / f"{name[:-4]}.txt", "0 0.5 0.5 0.5 0.5\n")
        source = tmp_path / "obj.data"
    data = read_annotations(source, None if kind.startswith("yolo") else tmp_path / "images")
    split_dataset(data, {"val": 0.25})
    parts = {name: {Path(i["file_name"]).name[:3] for i in data.split(name).images} for name in data.splits}
    assert (
        len(parts["val"]) == 1
        and len(parts["train"]) == 3
        and "4 tasks or subsets: each stays in one split" in data.notes
    )
