"""What renames one official format's entries to vitkit's."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

State = dict[str, Tensor]


class Converter(NamedTuple):
    """How one official format is recognised and renamed."""

    name: str
    """As reports give it."""
    marks: tuple[str, ...]
    """Keys that together only this format has; below any prefix where they begin with a dot."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expression and replacement; all are applied in turn."""
    transform: Callable[[State, nn.Module], State] | None = None
    """What renaming cannot do, given the renamed state and the model that it will be loaded into."""
    classes: tuple[str, ...] | None = None
    """The classes that the official weights were trained on, in the order of their head; None if they differ."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        return all(
            any(key == mark[1:] or key.endswith(mark) for key in state) if mark.startswith(".") else mark in state
            for mark in self.marks
        )

    def convert(self, state: Mapping[str, Tensor], model: nn.Module) -> State:
        renamed = {self._rename(key): value for key, value in state.items()}
        return self.transform(renamed, model) if self.transform else renamed

    def _rename(self, key: str) -> str:
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key
