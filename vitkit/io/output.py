"""Writes a dataset's files: all below one folder, each complete or absent."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from vitkit.errors import DataError, VitkitError
from vitkit.io.atomic import link_atomically, renaming, write_atomically
from vitkit.io.image_files import path_inside, read_header, upright_size


def write_bytes(path: Path, data: bytes, *, below: Path | None = None) -> None:
    """Write a file; an earlier one is replaced when the new one is complete.

    Args:
        below: folder that the file must not leave through a symbolic link.
    Raises:
        DataError: it cannot be written.
    """
    try:
        if below is not None:
            check_links(path, below)
        write_atomically(path, lambda file: file.write(data), sync=False)
    except DataError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with half a character
        raise unwritable(path, error) from error


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Write a UTF-8 file; see `write_bytes`."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise unwritable(path, error) from error
    write_bytes(path, data, below=below)


def make_new_folder(path: Path) -> Path:
    """Make a folder that did not exist, with a number after its name if another one has it; return it.

    Raises:
        DataError: it cannot be made.
    """
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # by whoever was first, also at the same time
            continue
        except OSError as error:
            raise unwritable(folder, error) from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a library to write to, and rename it afterwards; see `write_bytes`."""
    try:
        with renaming(path, sync=False) as temporary:
            yield temporary
    except VitkitError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error


@contextmanager
def writing_text(path: Path, *, below: Path) -> Iterator[TextIO]:
    """Yield a UTF-8 file to write to part by part; see `write_bytes`."""
    with writing(path) as temporary:
        check_links(path, below)
        with temporary.open("x", encoding="utf-8") as file:
            yield file


def link_image(source: Path, out: Path, name: str) -> Path:
    """Link an image into a folder, or copy it if the file system has no links.

    Args:
        out, name: the folder, which the file must not leave through a symbolic link, and the file below it.
    Returns:
        the file.
    Raises:
        DataError: the source is not an image, or the name leads out of the folder.
    """
    target = path_inside(out, name, f"'{source}'")
    # Only what is an image is linked, and no array: annotations could name any file.
    (read_header if source.suffix.lower() == ".npy" else upright_size)(source)
    try:
        if target.exists() and target.samefile(source):
            return target
        check_links(target, out)
        link_atomically(source, target, sync=False)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise unwritable(target, error) from error
    return target


def check_links(path: Path, folder: Path) -> None:
    """Raise a DataError if a file would be written outside a folder, through a link to another folder."""
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"'{path}' lies outside '{folder}', as a folder in between is a link. Remove it.")


def unwritable(path: Path, error: Exception) -> DataError:
    """Return the error of a file that cannot be written."""
    if isinstance(error, UnicodeEncodeError):  # JSON and names of files can hold half a character
        return DataError(f"{path}: a name is not text that can be stored ({error.reason}). Correct it.")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    return DataError(
        f"'{path}' cannot be written ({reason}). Free some space, fix the permissions, or choose another --out."
    )
