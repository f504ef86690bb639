"""Reads the JSON files of annotations and results."""

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isfile
from pathlib import Path
from typing import Any

from vitkit.errors import DataError


class RepeatedKey(ValueError):
    """An object of a JSON file has a key twice."""


def read_json(path: str | Path, *, key: str = "annotations", remedy: str | None = None) -> Any:
    """Read an annotation or results file.

    Args:
        key: what the file is called in the config or the command, for messages.
        remedy: what to do if there is no such file; None: the advice for a dataset.
    Raises:
        DataError: there is no such file, or its content is not readable as JSON.
    """
    path = Path(path)
    with explain_errors(path, key, remedy), pause_gc():
        return json.loads(path.read_bytes(), object_pairs_hook=to_object)


@contextmanager
def explain_errors(path: Path, key: str = "annotations", remedy: str | None = None) -> Iterator[None]:
    """Convert errors of reading and parsing a file to DataErrors; the arguments are those of `read_json`."""
    remedy = (
        remedy or f"Download the dataset (see vitkit/data/README.md), or correct data.root or `{key}` of this dataset."
    )
    if not isfile(path):  # Path.is_file raises for a name that is too long
        raise DataError(f"{key}: no file '{path}'. {remedy}")
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{key}: cannot read '{path}' ({error.strerror}). {remedy}") from error
    except (ValueError, RecursionError) as error:
        remedy = _explanation(path) if isinstance(error, json.JSONDecodeError) else "Correct it."
        raise DataError(f"{path.name}: {_reason(error)} ('{path}', {path.stat().st_size} bytes). {remedy}") from error


def _reason(error: ValueError | RecursionError, *, is_line: bool = False) -> str:
    """Say why a text, which may be a line of a file, is not readable as JSON."""
    if isinstance(error, RepeatedKey):
        return f"an object has the key {str(error)!r:.100} twice, of which readers take only one"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON at {'' if is_line else f'line {error.lineno}, '}column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"not text in UTF-8 ({error})"
    if isinstance(error, RecursionError):
        return "nests lists too deeply"
    return f"a number that is too long ({error})"  # Python converts numbers of at most 4300 digits


def read_json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Read a file with a JSON value in each line, and yield the number of each line and its value; blank lines count.

    Raises:
        DataError: there is no such file, or a line is not readable as JSON.
    """
    path = Path(path)
    with explain_errors(path, remedy="Correct the path."), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if text := line.strip():
                try:
                    value = json.loads(text, object_pairs_hook=to_object)
                except (ValueError, RecursionError) as error:
                    hint = "A truncated download ends within an object. " * isinstance(error, json.JSONDecodeError)
                    reason = f"{_reason(error, is_line=True)}. {hint}Correct it."
                    raise DataError(f"{path.name} line {number}: {reason}") from error
                yield number, value


def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON file, unless it would lose a value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise RepeatedKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return content


def _explanation(path: Path) -> str:
    """Explain what a file that is not JSON may be instead."""
    with path.open("rb") as file:
        start = file.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if not start:
        return "It is empty: fetch or export it again."
    if start == b"<":
        return (
            "This is XML or HTML. Give the JSON, or convert Pascal VOC's and CVAT's XML: vitkit data convert --to coco"
        )
    if path.suffix.lower() in (".yaml", ".yml", ".txt", ".csv") or start not in (b"{", b"["):
        return (
            f"This is text, not JSON. Give the JSON, or convert it: vitkit data convert {path} --to coco --out NEW.json"
        )
    return "A truncated download looks like this: fetch the file again."


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause garbage collection, which would visit the millions of new objects of a large file repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
