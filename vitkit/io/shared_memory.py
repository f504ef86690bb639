"""Arrays, also of texts, that worker processes share with the training process, however they are started."""

import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np


class SharedArray(np.ndarray):
    """An array in shared memory; its slices and elements are ordinary arrays.

    Forked processes inherit the memory; processes started otherwise receive its file descriptor in place of a copy.
    Pickled for any other purpose it becomes an ordinary array. A process that writes to it changes only its own copy of
    that page.
    """

    def __array_finalize__(self, source: Any) -> None:
        self._file: int | None = None  # results of computations are not shared

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __reduce__(self) -> tuple:
        if self._file is None or get_spawning_popen() is None:
            return np.array(self, subok=False).__reduce__()
        return _receive, (reduction.DupFd(self._file), self.dtype, self.shape)


def share(array: np.ndarray) -> np.ndarray:
    """Move an array to memory that processes share; arrays that are there, empty ones, and all arrays on non-POSIX
    systems, are returned as is.

    The memory has no name: it is freed with the last process that uses it, even if that is killed.
    """
    if os.name != "posix" or not array.nbytes or isinstance(array, SharedArray):
        return array
    array = np.ascontiguousarray(array)
    # Not in /dev/shm, as PyTorch's shared tensors are: containers often limit it to 64 MB, of which COCO's annotations
    # take 42. Systems other than Linux get a file that is already deleted.
    file = os.memfd_create("vitkit") if sys.platform == "linux" else _open_deleted_file()
    os.ftruncate(file, array.nbytes)
    with mmap.mmap(file, array.nbytes) as memory:
        np.frombuffer(memory, np.uint8)[:] = array.reshape(-1).view(np.uint8)
    return map_file(file, array.dtype, array.shape)


def _open_deleted_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _receive(descriptor: Any, dtype: np.dtype, shape: tuple[int, ...]) -> SharedArray:
    return map_file(descriptor.detach(), dtype, shape)


def map_file(file: int, dtype: np.dtype, shape: tuple[int, ...]) -> SharedArray:
    """Map an open file, which is closed with the array."""
    memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    array = np.frombuffer(memory, dtype).reshape(shape).view(SharedArray)
    array._file = file
    weakref.finalize(array, os.close, file)
    return array


def join_texts(texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as (bytes,) uint8 and (N + 1,) int64, the position where each begins: NumPy's own texts take four
    bytes per letter, and all have the length of the longest."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)], dtype=np.int64)


def text_at(data: np.ndarray, offsets: np.ndarray, index: int) -> str:
    """Return one of the texts that `join_texts` joined; raises IndexError."""
    start, stop = offsets[:-1][index], offsets[1:][index]
    return data[start:stop].tobytes().decode("utf-8", "surrogatepass")
