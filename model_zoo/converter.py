"""The converter of one official format: how it is recognised, and how its entries are renamed to vitkit's names."""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor, nn

State = dict[str, Tensor]


class Converter(NamedTuple):
    """How one official format is recognised and renamed."""

    name: str
    """The format's name in reports."""
    marks: tuple[str, ...]
    """A set of keys that only this format has; a key that begins with a dot may have any prefix."""
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression and its replacement, which are all applied in turn."""
    transform: Callable[[State, nn.Module], State] | None = None
    """Makes the changes that renaming cannot, from the renamed state and the model that it will be loaded into."""
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
    """Return the part before `suffix` of the first key in the model's state dict that ends with it; "" if none does."""
    return next((key.removesuffix(suffix) for key in model.state_dict() if key.endswith(suffix)), "")
