"""What a format's file offers to the tests of broken input."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vitkit.errors import VitkitError


@dataclass(frozen=True)
class Format:
    """One format that vitkit reads.

    A case is a folder: `write` puts changed files into it, and `check` reads them, as often as one likes. A case that
    failed is kept in tests/corpus/NAME/, where it is checked for ever. To add a format write a module with a list
    FORMATS of these, and name the module in test_broken_input.py.
    """

    name: str
    write: Callable[[random.Random, Path, Path], None]
    """Of random numbers, the case's folder and the sound world."""
    check: Callable[[Path, Path], None]
    """Of the case's folder and the sound world; asserts what must hold of anything that is accepted."""
    error: type[VitkitError]
    """How a case may end else."""
    share: int
    """Its part of the cases."""
    warm_up: Callable[[], object] = lambda: None
    """Imports and makes what all cases need, once, in the process that they are forked from."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Check that an error which a block raises names a file."""
    try:
        yield
    except VitkitError as error:
        assert name in str(error), f"the message does not name {name}: {str(error)[:300]}"
        raise
