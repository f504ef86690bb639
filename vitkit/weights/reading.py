"""Checkpoint files, read without running code."""

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vitkit import model_zoo
from vitkit.devices import is_out_of_memory
from vitkit.errors import CheckpointError
from vitkit.registry import nearest
from vitkit.weights.array_files import SAFE_GLOBALS, inert_pickle, read_arrays, read_pickled_arrays
from vitkit.weights.contents import stated_classes
from vitkit.weights.transformers_folder import (
    INDEX_SUFFIX,
    WEIGHTS,
    add_metadata,
    find_weights_in,
    is_transformers_folder,
    list_files_in_index,
    read_folder_metadata,
    read_safetensors,
    read_safetensors_entries,
    read_weight_map,
)

SHARDS_SUFFIX = ".shards"
"""Suffix of the names of folders with shards, see vitkit/weights/sharded.py."""
_MAX_COMPRESSION = 50
"""How much smaller than its arrays an .npz file may be; PyTorch's files are not compressed."""
_STARTS = (b"PK", b"\x80")
"""First bytes of checkpoints: those of a zip archive, and those of a pickle, the format before PyTorch 1.6."""


def read_checkpoint(path: str | Path, *, with_shards: bool = True) -> dict[str, Any]:
    """Read a PyTorch file, arrays saved by numpy (.npz, .pkl), or weights of vitkit or the transformers library
    (.safetensors, the index of several files, a folder), on the CPU; only tensors and plain values are read.

    Args:
        with_shards: also read the full tensors of a sharded checkpoint; otherwise they are left out, and "shards" says
            where they are.
    Raises:
        CheckpointError: the file is missing, damaged, or contains pickled code (which is not run).
    """
    path = Path(path)
    if os.path.isdir(path) and is_transformers_folder(path):
        weights = find_weights_in(path)
        if weights is None:
            raise CheckpointError(f"'{path}' has no weights: expected {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}.")
        return add_metadata(path, read_checkpoint(weights))
    _check_exists(path)
    if (other := _other_format(path)) is not None:
        return other[0](path)
    _check_checksums(path)
    state = _unpickle(path)
    if isinstance(state.get("shards"), Mapping):
        # Few checkpoints are sharded, and importing the code that reads them takes a second.
        from vitkit.weights.sharded import check_shards, read_full

        check_shards(path, state["shards"], checksums=with_shards)
        return read_full(path, state) if with_shards else dict(state)
    return dict(state)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Read the contents of a checkpoint other than its weights, such as its config and classes, without reading those.

    Raises:
        CheckpointError: as for `read_checkpoint`, except that damaged weights are not detected.
    """
    path = Path(path)
    if os.path.isdir(path) and is_transformers_folder(path):
        return read_folder_metadata(path)
    _check_exists(path)
    if (other := _other_format(path)) is not None:
        return other[1](path)
    _check_checksums(path, of_tensors=False)
    # Memory-mapped tensors are only read when used. Files from before PyTorch 1.6 cannot be mapped.
    return dict(_unpickle(path, mmap=_is_archive(path)))


def _other_format(path: Path) -> tuple[Callable[[Path], dict[str, Any]], Callable[[Path], dict[str, Any]]] | None:
    """Return what reads a file by its name, and what reads its contents other than weights; None: PyTorch does."""
    formats = {
        ".safetensors": (_read_safetensors, read_safetensors_entries),
        INDEX_SUFFIX: (_read_shards, lambda _: {}),
        ".npz": (_read_npz, lambda _: {}),
        ".pkl": (read_pickled_arrays, lambda _: {}),
    }
    return next((readers for suffix, readers in formats.items() if path.name.endswith(suffix)), None)


def _read_safetensors(path: Path) -> dict[str, Any]:
    state, entries = read_safetensors(path), read_safetensors_entries(path)
    return {"model": state, **entries} if entries else state


def _read_npz(path: Path) -> dict[str, Any]:
    _check_sizes(path, _MAX_COMPRESSION)
    return read_arrays(path)


def _read_shards(index: Path) -> dict[str, Any]:
    """Read the tensors of all files that an index lists; raise a CheckpointError if the index or a file is missing or
    damaged, or a file lacks a tensor that the index lists for it."""
    files = read_weight_map(index)
    state: dict[str, Any] = {}
    for name in list_files_in_index(index):
        if not os.path.isfile(index.parent / name):  # Path.is_file raises for a name that is too long
            raise CheckpointError(f"{index}: lists {name}, which is not beside it. Download that file as well.")
        state |= read_checkpoint(index.parent / name)
    missing = [key for key in files if key not in state]
    if missing:
        raise CheckpointError(f"{index}: {files[missing[0]]} lacks {missing[0]} ({len(missing)} in all). Get it again.")
    return state


def find_shards_folder(path: Path) -> str | None:
    """Return the name of the folder that contains a checkpoint's shards, or None if it has none.

    Raises:
        CheckpointError: it cannot be read.
    """
    shards = read_metadata(path).get("shards")
    return shards.get("folder") if isinstance(shards, Mapping) else None


def check_not_shards(path: Path) -> None:
    """Raise a CheckpointError if a path is the folder of a checkpoint's shards, which does not say what is in them."""
    if path.name.endswith(SHARDS_SUFFIX) and os.path.isdir(path):
        files = [file for file in sorted(path.parent.glob("*.pth")) if find_shards_folder(file) == path.name]
        raise CheckpointError(
            f"{path}: contains the shards of a checkpoint, whose file is beside it. Give that: "
            f"{' or '.join(map(str, files)) or 'it is missing'}."
        )


def _check_exists(path: Path) -> None:
    if os.path.isfile(path):  # Path's own methods raise an OSError for a name that is too long
        return
    check_not_shards(path)
    # If a run's folder was named, list its checkpoints; otherwise those beside the missing file.
    folder = path if os.path.isdir(path) else path.parent
    names = [file.name for suffix in (".pth", ".safetensors") for file in folder.glob(f"*{suffix}")]
    place = "the current folder" if folder == Path() else repr(str(folder))
    others = f"In {place}: {nearest(path.name, names)}" if names else f"There is none in {place}."
    zoo = ", only a name of the model zoo; expected a file" if model_zoo.listed_name(str(path)) else ""
    raise CheckpointError(f"no checkpoint {str(path)!r}{zoo}. {others}")


def _unpickle(path: Path, *, mmap: bool = False) -> Mapping[str, Any]:
    try:
        try:
            with torch.serialization.safe_globals(SAFE_GLOBALS):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError:
            if (state := _load_runner(path, mmap=mmap)) is None:
                raise
    except Exception as error:  # a damaged file, or a text file, can make the unpickler raise anything
        raise _unreadable(path, error) from error
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: contains a {type(state).__name__}; expected a dict of tensors.")
    return stated_classes(state) | dict(state)


def _load_runner(path: Path, *, mmap: bool) -> Mapping[str, Any] | None:
    """Return meta and weights of a checkpoint of mmengine's runner, whose other entries are objects; None for other
    files."""
    if not _is_archive(path):
        return None
    with zipfile.ZipFile(path) as file:
        if any(name.endswith("/constants.pkl") for name in file.namelist()):
            return None  # TorchScript, which torch would run
    state = torch.load(path, map_location="cpu", pickle_module=inert_pickle, weights_only=False, mmap=mmap)
    is_runner = isinstance(state, Mapping) and all(isinstance(state.get(k), Mapping) for k in ("meta", "state_dict"))
    return {key: state[key] for key in ("meta", "state_dict")} if is_runner else None


def _check_sizes(path: Path, max_compression: int) -> None:
    """Check that an archive's contents are not larger than it can hold, before they are read into memory; raise a
    CheckpointError if they are larger."""
    if not _is_archive(path):
        return  # reported by whoever reads it
    try:
        with zipfile.ZipFile(path) as file:
            claimed = sum(member.file_size for member in file.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: truncated or damaged ({error}). Get the file again.") from error
    size = path.stat().st_size
    if claimed > max_compression * size:
        raise CheckpointError(
            f"{path}: damaged: {size} bytes that claim to contain {claimed}; expected at most {max_compression} times "
            "as many. Get the file again."
        )


def _is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, as `torch.save` writes; raise a CheckpointError if its table of contents is
    damaged."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile as error:  # up to Python 3.12, for a damaged end of a large archive
        raise CheckpointError(f"{path}: truncated or damaged ({error}). Get the file again.") from error


def _check_checksums(path: Path, *, of_tensors: bool = True) -> None:
    """Verify the checksums in the file; raise a CheckpointError if a checksum is wrong."""
    # `torch.load` does not verify them, so damage would change weights unnoticed.
    if not _is_archive(path):
        return  # an older format, or a truncated file, which `torch.load` reports
    _check_sizes(path, 1)
    try:
        with zipfile.ZipFile(path) as file:
            if of_tensors:
                damaged = file.testzip()
            else:
                damaged = None
                for name in file.namelist():
                    if name.endswith("data.pkl"):
                        file.read(name)  # which raises BadZipFile if the checksum is wrong
    except (OSError, EOFError, RuntimeError, NotImplementedError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise CheckpointError(f"{path}: truncated or damaged ({error}). Get the file again.") from error
    if damaged:
        raise CheckpointError(f"{path}: damaged: the checksum of {damaged} is wrong. Get the file again.")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """Explain why a file could not be read, based on its first bytes and on the error that torch raised."""
    with path.open("rb") as file:
        start = file.read(24)
    if not start.startswith(_STARTS):
        text = start.decode("utf-8", errors="ignore")
        is_text = text.strip() and all(letter.isprintable() or letter.isspace() for letter in text)
        what = f"a text that begins with {text!r}" if is_text else "something else" if start else "empty"
        return CheckpointError(f"{path}: not a PyTorch checkpoint: the file is {what}. Get the file again.")
    message = str(error)
    if isinstance(error, pickle.UnpicklingError) and ("Unsupported global" in message or "GLOBAL" in message):
        return CheckpointError(
            f"{path}: refused, because it contains pickled code and not only tensors ({_global_name(message)}). "
            "Loading it could run anything. If you trust it, load it yourself with torch.load(..., "
            "weights_only=False), save its state dict with torch.save, and load that."
        )
    if is_out_of_memory(error):
        return CheckpointError(
            f"{path}: not enough memory to load it, or it is damaged. End other programs, or get the file again."
        )
    # The unpickler's message about a damaged file ("pop from empty list") would not help anyone.
    is_telling = message and isinstance(error, OSError | RuntimeError)
    reason = f" ({message.splitlines()[0].partition('. ')[0]})" if is_telling else ""
    return CheckpointError(f"{path}: truncated or damaged{reason}. Get the file again.")


def _global_name(message: str) -> str:
    """Return the name that torch refused to load, according to its error message."""
    marker = "GLOBAL "
    return message.split(marker, 1)[1].split(" was not", 1)[0] if marker in message else "an unsupported object"
