"""Checkpoint files, written atomically: a file with its final name is always complete."""

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from vitkit.errors import CheckpointError

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of files and folders that are being written; one that is left over is from a killed run."""


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write `state` to a temporary name and rename it: `path` is always a complete checkpoint.

    Raises:
        CheckpointError: it cannot be written, for instance because the disk is full. An earlier file at `path` is still
            intact.
    """
    _write(Path(path), lambda file: torch.save(dict(state), file))


def write_atomically(path: Path, data: bytes) -> None:
    """Write bytes in the same way as `save_checkpoint`."""
    _write(path, lambda file: file.write(data))


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a .safetensors file atomically.

    Raises:
        CheckpointError: it cannot be written, or the package is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise CheckpointError(f"{path}: writing it needs safetensors: pip install 'vitkit[hub]'.") from error
    # Each tensor is stored separately, even if several are views of one.
    data = save({key: value.detach().cpu().contiguous().clone() for key, value in state.items()}, {"format": "pt"})
    write_atomically(path, data)


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder. Expected the name of a file to write.")
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    except (OSError, RuntimeError) as error:
        raise _not_saved(path, temporary, error) from error


def link_checkpoint(source: str | Path, target: str | Path) -> None:
    """Give a checkpoint a second name, or copy it if the file system has no links; `target` is always complete.

    Raises:
        CheckpointError: see `save_checkpoint`.
    """
    target = Path(target)
    temporary = target.with_name(target.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        _rename(temporary, target)
    except OSError as error:
        raise _not_saved(target, temporary, error) from error


def _rename(temporary: Path, path: Path) -> None:
    os.replace(temporary, path)
    temporary.unlink(missing_ok=True)  # os.replace keeps it if both are names of one file
    sync_folder(path.parent)  # the new name is only on the disk when its folder is synced


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are written to the disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _not_saved(path: Path, temporary: Path, error: BaseException) -> CheckpointError:
    with suppress(OSError):
        temporary.unlink(missing_ok=True)
    cause: BaseException | None = error  # torch raises an error of its own while handling that of a failed write
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
    intact = " The previous checkpoint is intact." if path.exists() else ""
    return CheckpointError(f"{path}: not saved ({reason}).{intact} Make room, or check the disk.")
