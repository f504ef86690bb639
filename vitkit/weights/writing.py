"""Checkpoint files, written atomically: a file with its final name is always complete."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vitkit.errors import CheckpointError
from vitkit.io.atomic import link_atomically, write_atomically


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write `state` to a temporary name and rename it: `path` is always a complete checkpoint.

    Raises:
        CheckpointError: it cannot be written, for instance because the disk is full. An earlier file at `path` is still
            intact.
    """
    _write(Path(path), lambda file: torch.save(dict(state), file))


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes in the same way as `save_checkpoint`."""
    _write(path, lambda file: file.write(data))


def _write(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder. Expected the name of a file to write.")
    try:
        write_atomically(path, write)
    except (OSError, RuntimeError) as error:
        raise _not_saved(path, error) from error


def link_checkpoint(source: str | Path, target: str | Path) -> None:
    """Give a checkpoint a second name, or copy it if the file system has no links; `target` is always complete.

    Raises:
        CheckpointError: see `save_checkpoint`.
    """
    try:
        link_atomically(source, Path(target))
    except OSError as error:
        raise _not_saved(Path(target), error) from error


def _not_saved(path: Path, error: BaseException) -> CheckpointError:
    cause: BaseException | None = error  # torch raises an error of its own while handling that of a failed write
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    reason = cause.strerror if isinstance(cause, OSError) else str(error).splitlines()[0]
    intact = " The previous checkpoint is intact." if path.exists() else ""
    return CheckpointError(f"{path}: not saved ({reason}).{intact} Free some space, or check the disk.")
