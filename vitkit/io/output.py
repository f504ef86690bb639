"""Writes a dataset's files: all below one folder, each complete or absent."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import DataError, VitkitError
from vitkit.io.atomic import renaming, write_atomically


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
