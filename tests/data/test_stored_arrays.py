"""A large annotation file is parsed once per machine, and what is stored of it is what is read from it."""

import json
import logging
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets import coco as coco_module
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.loading.shared_memory import SharedArray


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(coco_module, "MIN_BYTES", 0)
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "images").mkdir()
    for name, size in {"é 0.png": (40, 30), "1.png": (20, 20), "2.png": (50, 10)}.items():
        Image.new("RGB", size, "red").save(tmp_path / "images" / name)
    return write(tmp_path)


def write(folder, *, scale=1):
    box = [2 * scale, 3, 10, 5]
    polygon = [2.0 * scale, 3.0, 12.0 * scale, 3.0, 12.0 * scale, 8.0]
    objects = [
        dict(
            id=k + 5,
            image_id=7 + k % 2,
            category_id=4 - 2 * (k % 2),
            bbox=box,
            area=50,
            iscrowd=0,
            segmentation=[polygon],
        )
        for k in range(5)
    ]
    content = {
        "images": [
            dict(id=7, file_name="é 0.png", width=40, height=30),
            dict(id=8, file_name="1.png", width=20, height=20),
            dict(id=9, file_name="2.png", width=50, height=10),
        ],
        "annotations": [*objects, objects[0] | dict(id=99, iscrowd=1), objects[0] | dict(id=100, bbox=[38, 3, 10, 5])],
        "categories": [dict(id=4, name="dog"), dict(id=2, name="cat")],
    }  # fmt: skip
    path = folder / "instances.json"
    path.write_text(json.dumps(content))
    return path


def read(file, **arguments):
    return CocoDetection(file.parent / "images", file, masks=True, **arguments)


@pytest.fixture
def reads(monkeypatch):
    """Return a list with an entry for each time that the file is parsed."""
    calls, original = [], CocoDetection._read
    monkeypatch.setattr(CocoDetection, "_read", lambda self, **kwargs: calls.append(1) or original(self, **kwargs))
    return calls


def same(a, b):
    assert vars(a).keys() == vars(b).keys()
    for name, value in vars(a).items():
        other = getattr(b, name)
        assert np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other, name
    for index in range(len(a)):
        ours, theirs = a.load_annotated(index), b.load_annotated(index)
        for field in ("image", "boxes_xyxy", "labels", "masks"):
            assert np.array_equal(getattr(ours, field), getattr(theirs, field))


def test_second_process_reads_what_the_first_has_stored(file, reads, monkeypatch, caplog):
    with monkeypatch.context() as small:
        small.setattr(coco_module, "MIN_BYTES", 1 << 40)
        parsed = read(file)
        expected, truth = {**vars(parsed)}, parsed.ground_truth()
        del parsed._truth
    assert not (file.parent / "cache").exists() and expected["num_crowds"] == 1
    reads.clear()
    first, second = read(file), read(file)
    assert len(reads) == 1
    parsed._is_large = True
    same(parsed, first)
    same(first, second)
    assert isinstance(second._boxes_xyxy, SharedArray) and second.file_name(0) == "é 0.png"
    assert first.ground_truth() == second.ground_truth() == truth and len(reads) == 2
    again = pickle.loads(pickle.dumps(second))
    assert np.array_equal(again._boxes_xyxy, second._boxes_xyxy)


def test_messages_are_those_of_reading(file, caplog):
    caplog.set_level(logging.INFO, logger="vitkit")
    read(file)
    first = caplog.messages[:]
    caplog.clear()
    read(file)
    assert caplog.messages == first and "1 box clipped to the image" in first[-1] and "1 crowd region" in first[-1]


def test_changed_file_is_read_again_and_a_touched_one_is_not(file, reads):
    before = read(file)
    boxes = before._boxes_xyxy[:].copy()
    os.utime(file, (1, 1))
    read(file)
    assert len(reads) == 1
    write(file.parent, scale=2)
    assert not np.array_equal(read(file)._boxes_xyxy, boxes) and len(reads) == 2
    assert np.array_equal(before._boxes_xyxy, boxes)  # of a process that still uses it
    assert len(list((file.parent / "cache" / "annotations").glob("*/arrays.*"))) == 1


def test_other_settings_have_an_index_of_their_own(file, reads):
    assert len(read(file)) == 3 and len(read(file, first=1)) == 1 and len(read(file, names=["1*"])) == 1
    assert len(reads) == 3


@pytest.mark.parametrize("damage", ["index.json", "arrays.*/_boxes_xyxy"])
@pytest.mark.parametrize("content", [b"", b'{"state": 1}', None])
def test_damaged_index_is_built_again(file, reads, damage, content):
    expected = read(file)
    (path,) = (file.parent / "cache" / "annotations").glob(f"*/{damage}")
    path.unlink()  # `expected` has mapped the file
    if content is not None:
        path.write_bytes(content)
    same(expected, read(file))
    assert len(reads) == 2


def test_cache_that_cannot_be_written_is_said(file, reads, caplog, monkeypatch):
    (file.parent / "cache").write_text("")
    dataset = read(file)
    assert len(dataset) == 3 and len(reads) == 1
    assert "cannot be stored in" in caplog.text and "Set VITKIT_CACHE to a folder" in caplog.text


def _read_in_a_process(file, started, counted):
    coco_module.MIN_BYTES = 0
    original = CocoDetection._read

    def counting(self, **kwargs):
        with counted.get_lock():
            counted.value += 1
        return original(self, **kwargs)

    CocoDetection._read = counting
    started.wait()
    assert len(read(file)) == 3


def test_of_processes_that_start_together_one_builds(file):
    context = multiprocessing.get_context("fork")
    started, counted = context.Barrier(3), context.Value("i", 0)
    processes = [context.Process(target=_read_in_a_process, args=(file, started, counted)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0] and counted.value == 1
