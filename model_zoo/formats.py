"""Formats that can be read and written: a table of key names, how files are recognised, and which models they have."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from vitkit.model_zoo.converter import Converter
from vitkit.model_zoo.key_table import KeyTable


class Format(NamedTuple):
    """The key names of another project for one of vitkit's models."""

    name: str
    """The format's name in reports."""
    marks: Sequence[str]
    """A set of keys that only this format has, see `Converter`."""
    table: KeyTable
    model: str
    """The name of the model's class; for a classifier, of its backbone's class."""
    ours: Sequence[str] = ()
    """vitkit's keys that distinguish the format's models from others of the same class."""
    classes: tuple[str, ...] | None = None
    """The classes that the official weights were trained on, see `Converter`."""

    def converter(self) -> Converter:
        """Return the converter that reads the format."""
        return Converter(self.name, tuple(self.marks), transform=self.table.read, classes=self.classes)

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model, or a backbone without a model, has this format."""
        return type(model).__name__ == self.model and set(self.ours) <= model.state_dict().keys()
