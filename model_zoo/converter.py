"""The converter of one official format: how it is recognised, and how its entries are renamed to vitkit's."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

State = dict[str, Tensor]


class Converter(NamedTuple):
    """How one official format is recognised and renamed."""

    name: str
    """As in reports."""
    marks: tuple[str, ...]
    """Keys that only this format has together; below any prefix where they begin with a dot."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expression and replacement; all are applied in turn."""
    transform: Callable[[State, nn.Module], State] | None = None
    """Does what renaming cannot, from the renamed state and the model that it will be loaded into."""
    classes: tuple[str, ...] | None = None
    """The classes that the official weights were trained on, in the order of their head; None if they differ."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a state dict is of this format."""
        return all(
            any(key == mark[1:] or key.endswith(mark) for key in state) if mark.startswith(".") else mark in state
            for mark in self.marks
        )

    def convert(self, state: Mapping[str, Tensor], model: nn.Module) -> State:
        """Return the state dict under vitkit's names."""
        renamed = {self._rename(key): value for key, value in state.items()}
        return self.transform(renamed, model) if self.transform else renamed

    def _rename(self, key: str) -> str:
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key


def prefix_of(model: nn.Module, suffix: str) -> str:
    """Return what precedes `suffix` in the first name of the model's state dict that ends so; "" if none does."""
    return next((key.removesuffix(suffix) for key in model.state_dict() if key.endswith(suffix)), "")
