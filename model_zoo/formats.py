"""Formats that are read and written: a table of key names, how files are recognised, and the models they are of."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from vitkit.model_zoo.converter import Converter
from vitkit.model_zoo.key_table import KeyTable


class Format(NamedTuple):
    """The names that another project has for one of vitkit's models."""

    name: str
    """As in reports."""
    marks: Sequence[str]
    """Keys that only this format has together, as of `Converter`."""
    table: KeyTable
    model: str
    """The class of the model; of a classifier, that of its backbone."""
    ours: Sequence[str] = ()
    """Keys that tell apart the models of one class."""
    classes: tuple[str, ...] | None = None
    """As of `Converter`."""

    def converter(self) -> Converter:
        """Return what reads it."""
        return Converter(self.name, tuple(self.marks), transform=self.table.read, classes=self.classes)

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model, or a backbone alone, is one of these."""
        return type(model).__name__ == self.model and set(self.ours) <= model.state_dict().keys()
