"""Arrays that worker processes share have the same numbers in one memory, however the process is started."""

import copy
import gc
import multiprocessing
import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from vitkit.io.shared_memory import SharedArray, share

pytestmark = pytest.mark.skipif(os.name != "posix", reason="shared memory of POSIX systems")


def look(sender, array) -> None:
    """In another process, send the array's numbers and the file that its memory is mapped from."""
    seen = array.sum()
    array.view(np.ndarray)[0] = 77  # the page becomes private to this process
    sender.send((seen, type(array).__name__, shared_files()))


def shared_files() -> set[str]:
    """Return the inodes of this process's shared arrays, if the system reports them."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line.split()[4] for line in lines if "memfd:vitkit" in line}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_process_shares_the_memory_read_only(method):
    array = share(np.arange(5000))
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=look, args=(sender, array))
    process.start()
    seen, kind, files = receiver.recv()
    process.join()
    assert seen == array.sum() == 5000 * 4999 // 2 and kind == "SharedArray"
    assert files <= shared_files() and bool(files) == Path("/proc/self/maps").exists()


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.array(["a", "ünï"]), np.array([[1, 2]], np.uint8)])
def test_shared_array_equals_the_original(array):
    shared = share(array)
    assert isinstance(shared, SharedArray) and shared.dtype == array.dtype and shared.flags.writeable
    np.testing.assert_array_equal(shared, array)
    assert type(pickle.loads(pickle.dumps(shared))) is np.ndarray
    for copied in (pickle.loads(pickle.dumps(shared)), copy.deepcopy(shared)):
        np.testing.assert_array_equal(copied, array)


def test_slices_are_ordinary_arrays():
    shared = share(np.arange(10))
    assert type(shared[2:4]) is np.ndarray and type(shared[3]) is np.int64
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(shared + 1)), np.arange(10) + 1)


def test_empty_array_is_not_shared():
    assert type(share(np.zeros((0, 4)))) is np.ndarray


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux tells which files are open")
def test_file_is_closed_with_the_array():
    gc.collect()
    before = num_open_arrays()
    array = share(np.arange(10))
    rows = array[2:4]
    assert num_open_arrays() > before
    del array
    gc.collect()
    assert rows.tolist() == [2, 3]
    del rows
    gc.collect()
    assert num_open_arrays() == before


def num_open_arrays() -> int:
    """Return the number of this process's files that are those of arrays: threads of earlier tests may close others."""
    targets = []
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            targets.append(os.readlink(file))
    return sum("memfd:vitkit" in target for target in targets)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_coco_dataset_gives_the_same_samples_under_any_start_method(shared_data, method):
    from vitkit.data.datasets.coco import CocoDetection
    from vitkit.data.loading.settings import DataSettings

    root = shared_data / "coco_tiny"
    dataset = CocoDetection(
        str(root / "val2017"), str(root / "annotations" / "instances_val2017.json"), masks=True, first=3
    )
    alone, helped = (list(DataSettings(num_workers=n, start_workers=method).val_loader(dataset)) for n in (0, 1))
    assert len(alone) == 3
    for a, b in zip(alone, helped, strict=True):
        assert a.inputs["images"].equal(b.inputs["images"])
        assert a.targets[0]["boxes_cxcywh"].equal(b.targets[0]["boxes_cxcywh"])
        assert a.targets[0]["masks"].equal(b.targets[0]["masks"])
