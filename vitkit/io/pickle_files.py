"""Reads pickles of plain values, without running the code that a pickle may name."""

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from vitkit.errors import DataError


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, tuples, dicts, sets, texts and numbers; everything else has to name a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DataError(f"names {module}.{name}, which could run code; expected only lists, dicts, texts and numbers")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DataError("refers to values outside of the file; expected only lists, dicts, texts and numbers")


def read_plain_pickle(path: str | Path) -> Any:
    """Read a pickle of lists, dicts, texts and numbers, also one that Python 2 wrote.

    Raises:
        DataError: there is no such file, it is damaged, or names anything that is not a plain value.
    """
    remedy = "Download the original file again."
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"annotations: cannot read '{path}' ({error.strerror}). {remedy}") from error
    try:
        return _PlainUnpickler(io.BytesIO(data), encoding="utf-8", errors="replace").load()
    except DataError as error:
        raise DataError(f"annotations: '{path}' {error}. {remedy}") from error
    except (Exception, MemoryError) as error:  # damaged opcodes raise errors of many types
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"annotations: cannot read '{path}' as a pickle: {reason:.200}. {remedy}") from error
