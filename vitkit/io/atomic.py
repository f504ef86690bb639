"""Files written atomically: a file with its final name is always complete, and an earlier one stays until then."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of files and folders that are being written; one that is left over is from a killed run."""


def write_atomically(path: Path, write: Callable[[BinaryIO], Any], *, sync: bool = True) -> None:
    """Write a file under a temporary name, and rename it.

    Args:
        write: writes the content to an open file.
        sync: wait until the file is on the disk, so that it also survives a loss of power.
    Raises:
        OSError, RuntimeError: it cannot be written; the temporary file is removed, and an earlier file is intact.
    """
    with _rename(path, sync=sync) as temporary, temporary.open("xb") as file:
        write(file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def link_atomically(source: str | Path, target: Path, *, sync: bool = True) -> None:
    """Give a file a second name, or copy it if the file system has no links.

    Raises:
        OSError: see `write_atomically`.
    """
    with _rename(target, sync=sync) as temporary:
        try:
            # A second name of a symbolic link would lead nowhere in another folder.
            os.link(os.path.realpath(source), temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            if sync:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())


@contextmanager
def _rename(path: Path, *, sync: bool) -> Iterator[Path]:
    """Yield the temporary name of a file, which is then renamed to `path`, or removed after an error."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # if it is a link, the file that it leads to must not be written
        yield temporary
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # os.replace keeps it if both are names of one file
        if sync:
            sync_folder(path.parent)  # the new name is only on the disk when its folder is synced
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are written to the disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
