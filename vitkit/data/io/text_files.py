"""Reads text files with one entry per line."""

from pathlib import Path

from vitkit.errors import DataError


def read_lines(path: str | Path, key: str, *, remedy: str) -> list[tuple[int, str]]:
    """Read the lines of a UTF-8 file that are not blank, stripped, with their line numbers from 1.

    A DataError begins with `key`, the file's name in the config, and ends with the remedy.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise DataError(f"{key}: cannot read '{path}' ({reason}). {remedy}") from error
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
