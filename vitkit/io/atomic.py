"""Files written atomically: a file with its final name is always complete, and an earlier one stays until then."""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of files and folders that are being written; one that is left over is from a killed run."""
_MAX_NAME = 50
"""The letters of a file's name in its temporary one: with any letters, less than the 255 bytes of a name."""

_LEFT_OVER = re.compile(rf"(.*)\.[0-9a-f]{{8}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)


def write_atomically(path: Path, write: Callable[[BinaryIO], Any], *, sync: bool = True) -> None:
    """Write a file under a temporary name, and rename it.

    Args:
        write: writes the content to an open file.
        sync: wait until the file is on the disk, so that it also survives a loss of power.
    Raises:
        OSError, RuntimeError: it cannot be written; the temporary file is removed, and an earlier file is intact.
    """
    with renaming(path, sync=sync) as temporary, temporary.open("xb") as file:
        write(file)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def link_atomically(source: str | Path, target: Path, *, sync: bool = True) -> None:
    """Give a file a second name, or copy it if the file system has no links.

    Raises:
        OSError: see `write_atomically`.
    """
    with renaming(target, sync=sync) as temporary:
        try:
            # A second name of a symbolic link would lead nowhere in another folder.
            os.link(os.path.realpath(source), temporary)
        except OSError:
            shutil.copyfile(source, temporary)
            if sync:
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())


@contextmanager
def renaming(path: Path, *, sync: bool) -> Iterator[Path]:
    """Yield the temporary name of a file, which is then renamed to `path`, or removed after an error.

    No other process has that name: of several that write one file, the last one's is there in the end, complete.

    Args:
        sync: see `write_atomically`.
    """
    temporary = path.with_name(f"{path.name[:_MAX_NAME]}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # os.replace keeps it if both are names of one file
        if sync:
            sync_folder(path.parent)  # the new name is only on the disk when its folder is synced
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_left_over(paths: Iterable[Path]) -> None:
    """Remove the temporary files that a killed process left of some files, which nobody else may be writing."""
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name[:_MAX_NAME])
    for folder, written in names.items():
        for found in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            match = _LEFT_OVER.fullmatch(found.name)
            if match and match[1] in written:
                found.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are written to the disk, if the system supports it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
