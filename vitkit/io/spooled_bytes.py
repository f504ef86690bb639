"""Data that are built from an annotation file piece by piece, in memory or, if large, in a temporary file."""

import marshal
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from vitkit.errors import DataError
from vitkit.io.shared_memory import map_file

IN_MEMORY = 32 << 20
"""Number of bytes that are held in memory."""


class SpooledBytes:
    """Bytes that are written one after the other, and then read as one array.

    Args:
        name: name of the file that they are made of, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed with this object
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            DataError: the folder of temporary files is full or cannot be written.
        """
        with self._explain_errors():
            self._file.seek(self.size)
            self._file.write(data)
        self.size += len(data)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` - 1; raises like `write`, whose last bytes may only now be stored."""
        with self._explain_errors():
            self._file.seek(start)
            return self._file.read(stop - start)

    def array(self) -> np.ndarray:
        """Return all bytes, (size,) uint8: a copy of a few, otherwise the mapped file; raises like `read`."""
        if self.size <= IN_MEMORY or os.name != "posix":
            return np.frombuffer(self.read(0, self.size), np.uint8)
        with self._explain_errors():
            self._file.flush()
        return map_file(os.dup(self._file.fileno()), np.dtype(np.uint8), (self.size,))

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self._name}: reading it needs about its size in '{tempfile.gettempdir()}', the folder of temporary "
                f"files ({error.strerror}). Set TMPDIR to a folder with space that may be written."
            ) from error


class SpooledLists:
    """Lists of JSON values, such as the annotations of a file in parts, that are not held as objects."""

    def __init__(self, name: str):
        self._name, self._bytes = name, SpooledBytes(name)
        self._offsets = [0]

    def append(self, values: list[Any]) -> None:
        """Append a list; raises a DataError if it cannot be stored."""
        try:
            data = marshal.dumps(values)
        except ValueError as error:
            raise DataError(
                f"{self._name}: a value nests lists too deeply to be read ({error}). Expected a file for vitkit."
            ) from error
        self._bytes.write(data)
        self._offsets.append(self._bytes.size)

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the lists, whose values are new objects each time."""
        return (marshal.loads(self._bytes.read(start, stop)) for start, stop in pairwise(self._offsets))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what `read_lists` reads: (size,) uint8 and (lists + 1,) int64."""
        return self._bytes.array(), np.array(self._offsets, np.int64)


def read_lists(data: np.ndarray, offsets: np.ndarray) -> Iterator[list[Any]]:
    """Yield the lists of `SpooledLists.arrays`."""
    return (marshal.loads(data[start:stop]) for start, stop in pairwise(offsets.tolist()))
