"""Reads text files with one entry per line."""

from pathlib import Path

from vitkit.errors import DataError

_MAX_BYTES = 1 << 30


def read_lines(path: str | Path, key: str, *, remedy: str, max_bytes: int = _MAX_BYTES) -> list[tuple[int, str]]:
    """Read the lines of a UTF-8 file that are not blank, stripped, with their line numbers from 1.

    A DataError begins with `key`, the file's name in the config, and ends with the remedy.

    Args:
        max_bytes: size of the largest file that is read.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise DataError(f"{key}: '{path}' has more than {max_bytes} bytes. {remedy}")
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{key}: cannot read '{path}' ({reason}). {remedy}") from error
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
