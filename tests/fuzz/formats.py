"""The interface of a file format to the tests of broken input."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkit.errors import VitkitError

OPTIONS = "options.json"
"""The file of a case that says how its input is read."""


@dataclass(frozen=True)
class Format:
    """One format that vitkit reads.

    A case is a folder: `write` puts changed files into it, and `check` reads them, any number of times. A case that
    failed is kept in tests/corpus/NAME/, where it is checked from then on. To add a format, write a module with a list
    FORMATS of these, and name the module in surfaces.py.
    """

    name: str
    write: Callable[[random.Random, Path, Path], None]
    """Writes a case, from a random number generator, the case's folder and the folder of unchanged files."""
    check: Callable[[Path, Path], None]
    """Reads a case, from its folder and the folder of unchanged files; asserts what must hold if it is accepted."""
    error: type[VitkitError]
    """The error with which a case may be refused."""
    share: int
    """The format's share of the cases."""
    warm_up: Callable[[Path, Path], object] = lambda world, folder: None
    """Imports and makes what all cases need, once, in the process that they are forked from; may write to the folder,
    the second argument."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Check that an error raised in the block names a file."""
    try:
        yield
    except VitkitError as error:
        assert name in str(error), f"the message does not name {name}: {str(error)[:300]}"
        raise


def write_data(folder: Path, name: str, data: bytes | str) -> Path:
    """Write a file of a case's input."""
    path = folder / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_options(folder: Path, **options: Any) -> None:
    """Write how a case's input is read."""
    (folder / OPTIONS).write_text(json.dumps(options))
