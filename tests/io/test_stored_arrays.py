"""A large annotation file is parsed once per machine, and what is stored of it is what is read from it."""

import errno
import io
import json
import logging
import multiprocessing
import os
import pickle
import tempfile
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from vitkit.data.datasets import coco as coco_module
from vitkit.data.datasets.annotation_table import AnnotationTable
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.loading.samplers import TrainBatches
from vitkit.errors import DataError
from vitkit.io import json_stream, spooled_bytes
from vitkit.io import stored_arrays as stored_arrays_module
from vitkit.io.shared_memory import SharedArray
from vitkit.io.spooled_bytes import SpooledBytes


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


def state_of(dataset):
    """Return all that a dataset holds, but whether its file is large, as values that can be compared."""
    values = {**vars(dataset), **vars(dataset.table), "store": dataset.store.folder}
    return {name: np.array(value).tolist() for name, value in values.items() if name not in ("_is_large", "table")}


@pytest.fixture
def reads(monkeypatch):
    """Return a list with an entry for each time that the file is parsed."""
    calls, original = [], CocoDetection._read
    monkeypatch.setattr(CocoDetection, "_read", lambda self, **kwargs: calls.append(1) or original(self, **kwargs))
    return calls


def same(a, b):
    assert state_of(a) == state_of(b)
    for index in range(len(a)):
        ours, theirs = a.load_annotated(index), b.load_annotated(index)
        for field in ("image", "boxes_xyxy", "labels", "masks"):
            assert np.array_equal(getattr(ours, field), getattr(theirs, field))


def test_second_process_reads_what_the_first_has_stored(file, reads, monkeypatch, caplog):
    with monkeypatch.context() as small:
        small.setattr(coco_module, "MIN_BYTES", 1 << 40)
        parsed = read(file)
        truth = parsed.ground_truth()
        del parsed._truth
    assert not (file.parent / "cache").exists() and parsed.num_crowds == 1
    reads.clear()
    first, second = read(file), read(file)
    assert len(reads) == 1
    same(parsed, first)
    same(first, second)
    assert isinstance(second.table.boxes_xyxy, SharedArray) and second.file_name(0) == "é 0.png"
    assert first.ground_truth() == second.ground_truth() == truth and len(reads) == 2
    again = pickle.loads(pickle.dumps(second))
    assert np.array_equal(again.table.boxes_xyxy, second.table.boxes_xyxy)


def test_messages_are_those_of_reading(file, caplog):
    caplog.set_level(logging.INFO, logger="vitkit")
    read(file)
    first = caplog.messages[:]
    caplog.clear()
    read(file)
    assert caplog.messages == first and "1 box clipped to the image" in first[-1] and "1 crowd region" in first[-1]


def test_changed_file_is_read_again_and_a_touched_one_is_not(file, reads):
    before = read(file)
    boxes = before.table.boxes_xyxy[:].copy()
    os.utime(file, (1, 1))
    read(file)
    assert len(reads) == 1
    write(file.parent, scale=2)
    assert not np.array_equal(read(file).table.boxes_xyxy, boxes) and len(reads) == 2
    assert np.array_equal(before.table.boxes_xyxy, boxes)  # of a process that still uses it
    assert len(list((file.parent / "cache" / "annotations").glob("*/arrays.*"))) == 1


def test_file_that_is_replaced_while_it_is_read_is_read_again(file, reads, monkeypatch):
    read_once = CocoDetection._read

    def overtaken(self, **arguments):
        result = read_once(self, **arguments)
        if len(reads) == 1:
            write(file.parent, scale=2)
        return result

    monkeypatch.setattr(CocoDetection, "_read", overtaken)
    before, after = read(file).table.boxes_xyxy, read(file).table.boxes_xyxy
    assert not np.array_equal(before, after) and len(reads) == 2
    assert np.array_equal(read(file).table.boxes_xyxy, after) and len(reads) == 2


def test_other_settings_have_an_index_of_their_own(file, reads):
    assert len(read(file)) == 3 and len(read(file, first=1)) == 1 and len(read(file, names=["1*"])) == 1
    assert len(reads) == 3


@pytest.mark.parametrize("damage", ["index.json", "arrays.*/boxes_xyxy"])
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


@pytest.fixture
def read_only(monkeypatch):
    """Return a function after whose call nothing can be written into the cache."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    def make():
        monkeypatch.setattr(stored_arrays_module, "hold_lock", refuse)
        monkeypatch.setattr(stored_arrays_module, "write_atomically", refuse)

    return make


@pytest.mark.parametrize("is_touched", [False, True])
def test_index_on_a_read_only_disk_is_used(file, reads, caplog, read_only, is_touched):
    expected = read(file)
    read_only()
    if is_touched:
        os.utime(file, (1, 1))
    same(expected, read(file))
    assert len(reads) == 1 and "cannot be stored" not in caplog.text


def test_without_an_index_on_a_read_only_disk_the_file_is_parsed_once_per_process(file, reads, caplog, read_only):
    read_only()
    dataset = read(file)
    assert len(reads) == 1 and "(Read-only file system), so each process parses the file" in caplog.text
    assert dataset.ground_truth() == dataset.ground_truth() and len(reads) == 2


def test_index_of_another_version_is_not_read(file, reads, monkeypatch):
    expected = read(file)
    monkeypatch.setattr(stored_arrays_module, "_VERSION", stored_arrays_module._VERSION + 1)
    same(expected, read(file))
    assert len(reads) == 2


def test_index_of_an_older_version_is_left_alone(file, reads, monkeypatch):
    # Version 2 stored a dataset's attributes, "_labels" and others, in place of a table's fields.
    with monkeypatch.context() as older:
        older.setattr(stored_arrays_module, "_VERSION", 2)
        older.setattr(
            AnnotationTable, "to_dict", lambda table: {f"_{name}": value for name, value in vars(table).items()}
        )
        with pytest.raises(TypeError, match="unexpected keyword argument '_"):
            read(file)
    stored = sorted((file.parent / "cache").rglob("*labels"))
    dataset = read(file)
    assert len(reads) == 2 and dataset.table.labels.tolist() == read(file).table.labels.tolist()
    assert [path.name for path in stored] == ["_labels"] and stored[0].is_file()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device without space")
@pytest.mark.parametrize("use", [SpooledBytes.array, lambda spooled: spooled.read(0, 3)])
def test_space_that_lacks_for_the_last_bytes_is_said_when_they_are_read(monkeypatch, use):
    spooled = SpooledBytes("instances.json")
    with open("/dev/full", "r+b") as full:
        monkeypatch.setattr(spooled, "_file", full)
        spooled.write(b"123")  # which waits in a buffer
        with pytest.raises(DataError, match=r"instances\.json: reading it needs .* \(No space left on device\)"):
            use(spooled)
        with suppress(OSError):
            full.close()


def test_folder_of_temporary_files_without_space_is_said(file, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda **kwargs: Full())
    with pytest.raises(
        DataError, match=r"instances.json: reading it needs .* \(No space left on device\)\. Set TMPDIR"
    ):
        read(file)


def test_ground_truth_is_new_objects_each_time(file, reads):
    dataset = read(file)
    truth = dataset.ground_truth()
    truth["annotations"][0]["bbox"][0] = 1000
    assert dataset.ground_truth()["annotations"][0]["bbox"][0] == 2 and len(reads) == 2


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def set_value(part, position, field, value):
    return lambda content: content[part][position].update({field: value})


CHANGES = {
    "sound": lambda content: None,
    "annotations first": lambda content: content.update(images=content.pop("images")),
    "no annotation": lambda content: content["annotations"].clear(),
    "no images": lambda content: content.pop("images"),
    "no object": lambda content: content["annotations"].insert(3, 7),
    "wrong box": set_value("annotations", 5, "bbox", [1, 2, -3, 4]),
    "wrong fields": lambda content: [a.update(area=None, id=a["id"] % 2 or 0.5) for a in content["annotations"]],
    "wrong image too": lambda content: [content["images"][0].update(width=0), content["annotations"][4].pop("bbox")],
    "null classes": lambda content: [a.update(category_id=None) for a in content["annotations"]],
    "outside": set_value("annotations", 4, "bbox", [100, 2, 3, 4]),
    "wrong mask": set_value("annotations", 4, "segmentation", [[1, 2]]),
    "text ids": lambda content: [a.update(id="a", image_id=str(a["image_id"])) for a in content["annotations"]],
    "rotated": set_value("annotations", 4, "attributes", {"rotation": 30}),
    "another scale": lambda content: [image.update(width=2 * image["width"], height=2 * image["height"])
                                      for image in content["images"]],
    "hidden image": lambda content: content["images"][0].update(file_name=".hidden.png"),
    "outside the folder": lambda content: content["images"][1].update(file_name="../1.png"),
    "without ids": lambda content: [a.pop("id") for a in content["annotations"]],
}  # fmt: skip


@pytest.mark.parametrize("arguments", [{}, {"masks": False, "bad_boxes": "drop", "names": ["*0*", "1*"]}])
@pytest.mark.parametrize("change", CHANGES)
def test_file_that_is_read_in_parts_is_that_which_is_read_at_once(file, monkeypatch, caplog, change, arguments):
    edit(file, CHANGES[change])
    caplog.set_level(logging.INFO, logger="vitkit")
    monkeypatch.setattr(json_stream, "_ENTRIES", 2)
    monkeypatch.setattr(json_stream, "_READ", 100)
    outcomes = []
    for min_bytes in (1 << 40, 0):
        monkeypatch.setattr(coco_module, "MIN_BYTES", min_bytes)
        caplog.clear()
        try:
            dataset = CocoDetection(file.parent / "images", file, **{"masks": True, **arguments})
        except DataError as error:
            outcomes.append(str(error))
            continue
        truth = dataset.ground_truth()
        state = state_of(dataset)
        outcomes.append((state.pop("_truth") is not None, state, sorted({*caplog.messages}), repr(truth)))
    assert outcomes[0] == outcomes[1]


def test_building_an_index_takes_a_fraction_of_the_memory_of_the_parsed_file(file, monkeypatch):
    def repeat(content):
        entries = content["annotations"]
        entries[0]["segmentation"] = [[2.25 + k % 7 for k in range(60)]]
        content["annotations"] = [entries[0] | {"id": k} for k in range(3000)]

    edit(file, repeat)
    monkeypatch.setattr(json_stream, "_ENTRIES", 50)
    monkeypatch.setattr(json_stream, "_READ", 1 << 14)
    monkeypatch.setattr(spooled_bytes, "IN_MEMORY", 1 << 16)
    peaks = []
    for min_bytes in (0, 1 << 40):
        monkeypatch.setattr(coco_module, "MIN_BYTES", min_bytes)
        tracemalloc.start()
        read(file)
        peaks.append(tracemalloc.get_traced_memory()[1] / file.stat().st_size)
        tracemalloc.stop()
    assert peaks[0] < 2 < 4 < peaks[1], peaks


def test_samples_and_their_order_do_not_depend_on_how_the_file_is_read(file, monkeypatch):
    orders = []
    for min_bytes in (1 << 40, 0):
        monkeypatch.setattr(coco_module, "MIN_BYTES", min_bytes)
        dataset = read(file)
        batches = TrainBatches(len(dataset), batch_size=1, seed=3, groups=dataset.aspect_ratios() > 1)
        targets = [dataset[index]["target"] for batch in batches for index in batch]
        orders.append([(t["image_id"], t["boxes_cxcywh"].tolist(), t["masks"].sum().item()) for t in targets])
    assert orders[0] == orders[1] and len(orders[0]) == 3


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


def test_index_of_files_outside_is_not_taken_where_they_are_refused(file):
    content = json.loads(file.read_text())
    content["images"][0]["file_name"] = "../outside.png"
    file.write_text(json.dumps(content))
    images = file.parent / "images"
    (images / "é 0.png").rename(file.parent / "outside.png")
    assert len(CocoDetection(images, file, allow_outside=True, bad_boxes="drop")) == 3
    with pytest.raises(DataError, match="lies outside"):
        CocoDetection(images, file, bad_boxes="drop")
