"""Datasets split, merged and cut into tiles."""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.contents import count_classes
from vitkit.apps.datasets.image_groups import frame_number, group_images, series_of, similar_pairs, stratify, thumbnail
from vitkit.apps.datasets.merging import merge_datasets, tile_dataset
from vitkit.apps.datasets.splitting import split_dataset
from vitkit.apps.inference import Tiling
from vitkit.data.formats.annotated import UNREADABLE, AnnotatedImages
from vitkit.errors import ConfigError, DataError
from vitkit.io.segmentations import decode_segmentation


def noise(path, seed, size=(32, 24)):
    pixels = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)


def dataset(folder, names, objects=lambda k: ["cat"]):
    data = AnnotatedImages("coco", folder / "own.json", folder)
    for k, name in enumerate(names):
        noise(folder / name, k)
        image_id = data.add_image(name, 32, 24)
        for label in objects(k):
            data.add_object(image_id, label, [1, 2, 3, 4])
    return data


def files(data, split):
    return {image["file_name"] for image in data.split(split).images}


def test_each_class_has_its_share_in_each_split(tmp_path):
    data = dataset(tmp_path, [f"{k}x.png" for k in range(40)], lambda k: ["cat"] + ["rare"] * (k % 10 == 0))
    split_dataset(data, {"val": 0.25, "test": 0.25})
    assert {name: len(ids) for name, ids in data.splits.items()} == {"train": 20, "val": 10, "test": 10}
    assert {name: count_classes(data.split(name))["rare"] for name in data.splits} == {"train": 2, "val": 1, "test": 1}
    first = data.splits
    split_dataset(data, {"val": 0.25, "test": 0.25})
    assert data.splits == first
    split_dataset(data, {"val": 0.25, "test": 0.25}, seed=1)
    assert data.splits != first and {*chain(*data.splits.values())} == set(range(1, 41))


def test_a_number_of_images_is_met_whatever_their_objects(tmp_path):
    data = dataset(tmp_path, [f"{k}x.png" for k in range(60)], lambda k: ["cat"] * (k % 7) + ["rare"] * (k % 11 == 0))
    for seed in range(3):
        split_dataset(data, {"val": 0.2, "test": 17}, seed=seed)
        assert {name: len(ids) for name, ids in data.splits.items()} == {"train": 31, "val": 12, "test": 17}


def test_copies_and_recordings_stay_together(tmp_path):
    names = [f"rec{r}_{frame:04d}.png" for r in range(6) for frame in range(5)]
    data = dataset(tmp_path, names)
    split_dataset(data, {"val": 0.33})
    recordings = {name: {file[:4] for file in files(data, name)} for name in data.splits}
    assert not recordings["train"] & recordings["val"] and len(recordings["val"]) == 2
    assert any("6 recordings" in note for note in data.notes)

    data = dataset(tmp_path / "copies", [f"{k}x.png" for k in range(10)])
    for k in range(1, 5):
        noise(tmp_path / "copies" / f"{k}x.png", 0)  # looks like the first
    split_dataset(data, {"val": 0.5})
    copies = {f"{k}x.png" for k in range(5)}
    assert copies <= files(data, "train") or copies <= files(data, "val")


def test_adjacent_frames_stay_together_if_there_are_few_recordings(tmp_path):
    data = dataset(tmp_path, [f"rec{r}_{frame:04d}.png" for r in range(2) for frame in range(20)])
    split_dataset(data, {"val": 0.25})
    val = sorted(files(data, "val"))
    assert len(val) == 10
    pairs = {(name[:4], frame_number(name) // 2) for name in val}
    assert len(pairs) == 5


def test_patterns_choose_splits(tmp_path):
    data = dataset(tmp_path, ["a_1.png", "a_2.png", "b_1.png", "c_1.png"])
    split_dataset(data, patterns={"val": ["b_*"], "test": ["c_1"]})
    assert files(data, "train") == {"a_1.png", "a_2.png"} and files(data, "test") == {"c_1.png"}
    with pytest.raises(DataError, match="'b_1.png' matches the patterns of val and of test"):
        split_dataset(data, patterns={"val": ["b_*"], "test": ["*_1"]})
    with pytest.raises(DataError, match="no image matches z"):
        split_dataset(data, patterns={"val": ["z"]})
    with pytest.raises(DataError, match="no image is left for training"):
        split_dataset(data, patterns={"val": ["*"]})
    with pytest.raises(ConfigError, match="with a sum below 1"):
        split_dataset(data, {"val": 0.5, "test": 0.5})


def test_unreadable_image_is_named_and_in_no_split(tmp_path):
    data = dataset(tmp_path, [f"{k}x.png" for k in range(8)])
    (tmp_path / "3x.png").write_bytes(b"\x89PNG\r\n")
    split_dataset(data, {"val": 0.5})
    assert 4 not in chain(*data.splits.values()) and "3x.png" in data.left_out[UNREADABLE][0]


def test_dataset_without_a_readable_image_is_an_error(tmp_path):
    data = AnnotatedImages("coco", tmp_path, tmp_path)
    for name in ("a.png", "b.png"):
        data.add_image(name, 10, 10)
    with pytest.raises(DataError, match=r"none of the 2 images can be read, the first because of: .*a\.png"):
        split_dataset(data, {"val": 0.5})


def taken_at(path, second):
    """Write a photo of noise with the time of its camera; return its path."""
    path.parent.mkdir(exist_ok=True)
    noise(path, second)
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9003] = f"2026:01:01 10:00:{second:02d}"
    with Image.open(path) as image:
        image.save(path, exif=exif)
    return path


def test_bursts_are_recognized_by_camera_time(tmp_path):
    paths = [taken_at(tmp_path / f"{second}.jpg", second) for second in (1, 2, 30)]
    groups, errors = group_images(paths)
    assert groups[0] == groups[1] != groups[2] and not errors


def test_bursts_of_two_cameras_at_the_same_time_stay_together(tmp_path):
    paths = [taken_at(tmp_path / "ab"[second % 2] / f"{second}.jpg", second) for second in range(8)]
    groups, _ = group_images(paths)
    assert len({*groups[::2].tolist()}) == len({*groups[1::2].tolist()}) == 1 and groups[0] != groups[1]


def test_empty_split_is_an_error():
    with pytest.raises(DataError, match="val gets none of the 1 groups"):
        stratify(np.zeros(4, np.int64), [Counter({1: 1})] * 4, {"train": 0.8, "val": 0.2})


def test_file_names_are_grouped_into_series():
    frames = [f"{r}_{k:03d}.png" for r in "ab" for k in range(5)]
    assert set(series_of(frames)) == {"a_", "b_"}
    assert series_of([f"IMG_{k}.jpg" for k in range(10)]) is None
    assert series_of([f"{k}.jpg" for k in range(10)]) is None


def test_datasets_are_merged_by_class_name(tmp_path):
    a = dataset(tmp_path / "a", ["1.png"], lambda k: ["cat", "dirt"])
    b = dataset(tmp_path / "b", ["1.png", "2.png"], lambda k: ["Cats"])
    merged = merge_datasets([a, b], {"Cats": "cat", "dirt": ""}, tmp_path / "out")
    assert count_classes(merged) == {"cat": 3} and len(merged.images) == 3
    assert list(merged.left_out.values()) == [["dirt 2"]]
    assert all((merged.folder / image["file_name"]).is_file() for image in merged.images)
    with pytest.raises(DataError, match="--map cow: no dataset has this class"):
        merge_datasets([a, b], {"cow": "cat"}, tmp_path / "out")


def test_tiles_contain_the_visible_parts_of_objects(tmp_path):
    data = AnnotatedImages("coco", tmp_path / "own.json", tmp_path)
    noise(tmp_path / "a.png", 0, size=(64, 32))
    image_id = data.add_image("a.png", 64, 32)
    data.add_object(image_id, "cat", [4, 4, 8, 8])
    data.add_object(image_id, "cat", [24, 10, 20, 10])  # 8 of its 20 columns are in the first tile
    data.add_object(image_id, "dog", [28, 0, 6, 6], segmentation=[[28, 0, 34, 0, 34, 6, 28, 6]])
    tiled = tile_dataset(data, Tiling(32, 0).tiles, tmp_path / "out", min_visible=0.5)
    assert [image["file_name"] for image in tiled.images] == ["a_0_0.png", "a_32_0.png"]
    assert [(a["image_id"], a["bbox"]) for a in tiled.annotations] == [
        (1, [4, 4, 8, 8]),
        (1, [28, 0, 4, 6]),
        (2, [0, 10, 12, 10]),
    ]
    assert decode_segmentation(tiled.annotations[1]["segmentation"], 32, 32).sum() == 24
    whole = np.asarray(Image.open(tmp_path / "a.png"))
    assert (np.asarray(Image.open(tmp_path / "out/images/a_32_0.png")) == whole[:, 32:]).all()
    tiled = tile_dataset(data, Tiling(32, 0).tiles, tmp_path / "out", min_visible=0.9)
    assert len(tiled.images) == 1 and tiled.left_out["objects that no tile shows enough of"] == ["2", "3"]
    json.dumps(tiled.content)


def test_copies_are_recognized_despite_brightness_and_size_but_plain_images_are_not():
    rng = np.random.default_rng(0)
    images = [np.kron(rng.integers(20, 200, (8, 8, 1), dtype=np.uint8), np.ones((8, 8, 3), np.uint8)) for _ in range(5)]
    plain = np.full((64, 64, 3), 90, np.uint8)
    a = np.stack([thumbnail(image) for image in [*images, plain]])
    changed = [(images[3][::2, ::2] * 0.8 + 30).astype(np.uint8), plain, images[1]]
    assert list(similar_pairs(a, np.stack([thumbnail(image) for image in changed]))) == [(3, 0), (1, 2)]
    assert list(similar_pairs(a[:0], a)) == []
    assert list(similar_pairs(a[[0, 1, 0, 0]])) == [(0, 2), (0, 3), (2, 3)]
