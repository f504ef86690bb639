"""An index of a large annotation file, made once per machine and mapped into the memory of all processes.

Parsing a file of a million objects takes seconds and hundreds of megabytes in each rank; the arrays that are made of it
are stored in a cache folder, from which ranks and workers map the same pages.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.io.atomic import write_atomically
from vitkit.io.local_cache import cache_folder, file_digest, hold_lock
from vitkit.io.shared_memory import map_file

logger = logging.getLogger("vitkit")

MIN_BYTES = 32 << 20
"""Smaller files are parsed in each process: that takes less than a second."""
_VERSION = 3
"""To be raised when what is stored, or how annotations are read, changes."""
_INDEX, _LOCK = "index.json", "lock"


def load_or_build_arrays(file: Path, settings: Sequence[Any], build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the arrays and values that `build` makes of a file, or those that a process stored earlier.

    Args:
        file: the file, which has changed if its checksum has; its size and times tell whether to compute that.
        settings: what the result depends on besides, as values of JSON.
        build: returns arrays and values of JSON by name.
    """
    if os.name != "posix":
        return build()
    key = json.dumps([str(file.resolve()), settings, _VERSION, sys.version_info[:2]], sort_keys=True)
    folder = cache_folder() / "annotations" / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    built = None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with hold_lock(folder / _LOCK, f"{file.name}: waiting for another process, which reads it"):
            if (found := _find(folder, file)) is not None:
                return found
            state = _state(file)
            built = build()
            return _store(folder, file, state, built)
    except OSError as error:
        # What `build` reads raises DataError, so this is about the cache, which may be one that can only be read.
        if built is None and (found := _find(folder, file)) is not None:
            return found
        logger.warning(
            f"{file.name}: its index cannot be stored in '{folder}' ({error.strerror or error}), so each process "
            "parses the file. Set VITKIT_CACHE to a folder with space that may be written."
        )
        built = build() if built is None else built
    return built


def _find(folder: Path, file: Path) -> dict[str, Any] | None:
    """Return the stored arrays and values; None if they are missing, damaged, or of another version of the file."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        if index["state"] != _state(file):  # also if the same file was only copied anew or touched
            if index["checksum"] != file_digest(file, "sha256"):
                return None
            with suppress(OSError):  # of a cache that may only be read
                _write_index(folder, index | {"state": _state(file)})
        arrays = {name: _map(folder / data, *layout) for name, (data, *layout) in index["arrays"].items()}
        return index["values"] | arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str, shape: list[int]) -> np.ndarray:
    """Map a stored array; raises ValueError if its file has another size."""
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    if path.stat().st_size != size:
        raise ValueError(f"{path} is damaged")
    return map_file(os.open(path, os.O_RDONLY), np.dtype(dtype), tuple(shape)) if size else np.empty(shape, dtype)


def _store(folder: Path, file: Path, state: list[int], built: dict[str, Any]) -> dict[str, Any]:
    """Write the arrays and values that were built from a file in this state, and return them as they are read."""
    checksum = file_digest(file, "sha256")
    if _state(file) != state:  # It was replaced in between: what is stored would pass for the new file's.
        return built
    arrays = {name: np.ascontiguousarray(value) for name, value in built.items() if isinstance(value, np.ndarray)}
    # In a new folder, since other processes may have mapped what an earlier version of the file was made into.
    data = Path(tempfile.mkdtemp(dir=folder, prefix="arrays."))
    try:
        for name, array in arrays.items():
            (data / name).write_bytes(array.reshape(-1).view(np.uint8))
        index = {
            "file": str(file),
            "state": state,
            "checksum": checksum,
            "values": {name: value for name, value in built.items() if name not in arrays},
            "arrays": {name: (f"{data.name}/{name}", a.dtype.str, a.shape) for name, a in arrays.items()},
        }
        _write_index(folder, index)
    except OSError:
        shutil.rmtree(data, ignore_errors=True)
        raise
    for other in folder.glob("arrays.*"):
        if other != data:
            shutil.rmtree(other, ignore_errors=True)
    return index["values"] | {name: _map(data / name, a.dtype.str, list(a.shape)) for name, a in arrays.items()}


def _write_index(folder: Path, index: Mapping[str, Any]) -> None:
    write_atomically(folder / _INDEX, lambda file: file.write(json.dumps(index).encode()))


def _state(file: Path) -> list[int]:
    """Return the properties of a file that change when it is written, without reading it."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
