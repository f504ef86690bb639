"""What `load_weights` asks about weights that were published: their names, files and official key names.

The answers come from vitkit.model_zoo, which stands above this package: it calls `provide`, and is imported by its name
at the first question, as registries import the packages that fill them.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

_PROVIDER = "vitkit.model_zoo.converters"


class OfficialFormat(NamedTuple):
    """An official format that was recognized."""

    name: str
    """The format's name in reports."""
    classes: tuple[str, ...] | None
    """The classes that the weights were trained on, in the order of their head; None if unknown."""


class PublishedWeights(NamedTuple):
    """The functions that `provide` takes."""

    names: Callable[[], Collection[str]]
    """Return the names in the model zoo's index."""
    file_of: Callable[[str], Path]
    """Return the file of a name in the index, downloaded the first time."""
    name_of: Callable[[str | Path], str | None]
    """Return the name in the index of a file, or None."""
    convert: Callable[
        [Mapping[str, Tensor], nn.Module, Sequence[str] | None], tuple[dict[str, Tensor], OfficialFormat | None]
    ]
    """Rename a state dict for a model with these classes; return it and its format, None if that is not official."""
    describe: Callable[[Mapping[str, Any], Mapping[str, Tensor], OfficialFormat | None], str | None]
    """Describe the model and classes of a checkpoint with these tensors, for error messages; None if unknown."""


_provided: list[PublishedWeights] = []


def provide(published: PublishedWeights) -> None:
    """Set the answers, in place of earlier ones."""
    _provided[:] = [published]


def published() -> PublishedWeights:
    """Return the answers."""
    if not _provided:
        importlib.import_module(_PROVIDER)
    return _provided[0]
