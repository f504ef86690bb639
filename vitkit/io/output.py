"""Files that a dataset is written to: all below one folder, complete or not there at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vitkit.errors import DataError
from vitkit.io.atomic import TEMPORARY_SUFFIX, link_atomically, write_atomically
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
            _check_links(path, below)
        write_atomically(path, lambda file: file.write(data), sync=False)
    except DataError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with half a character
        raise _unwritable(path, error) from error


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Write a UTF-8 file; see `write_bytes`."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half a character
        raise DataError(f"{path}: a name is not text that can be stored ({error.reason}). Correct it.") from error
    write_bytes(path, data, below=below)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a library to write to, and rename it afterwards; see `write_bytes`."""
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        yield temporary
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


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
        _check_links(target, out)
        link_atomically(source, target, sync=False)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from error
    return target


def _check_links(path: Path, folder: Path) -> None:
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"'{path}' lies outside '{folder}', as a folder in between is a link. Remove it.")


def _unwritable(path: Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
    return DataError(
        f"'{path}' cannot be written ({reason}). Free some space, fix the permissions, or choose another --out."
    )
