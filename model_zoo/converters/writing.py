"""Write vitkit's weights with the names of the original repositories, or of another library."""

from typing import Literal, NamedTuple

from torch import nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters.formats import DETREX, MMDETECTION, OFFICIAL, TRANSFORMERS
from vitkit.model_zoo.converters.key_table import State

Target = Literal["official", "transformers", "mmdetection", "detrex"]
"""Whose names weights may get."""

_FORMATS = {
    target: [form for form in formats if form.model]
    for target, formats in (
        ("official", OFFICIAL),
        ("transformers", TRANSFORMERS),
        ("mmdetection", MMDETECTION),
        ("detrex", DETREX),
    )
}
_OURS = ("head.", "neck.", "encoder.", "decoder.")
"""Beginnings of the names that no other project uses."""


class Written(NamedTuple):
    """Weights with another project's names."""

    state: State
    format: str
    """The name of the format, whose names they have."""
    parts: tuple[str, ...] = ()
    """The state dicts that a file of this format holds side by side, see `Format`."""

    def nested(self) -> dict[str, State]:
        """Return the contents of a file: the state dict of each part, or {"model": all}."""
        if not self.parts:
            return {"model": self.state}
        nested: dict[str, State] = {part: {} for part in self.parts}
        for key, value in self.state.items():
            part, _, rest = key.partition(".")
            nested[part][rest] = value
        return nested


def write_names(model: nn.Module, target: Target) -> Written:
    """Return a model's weights with another project's names.

    Args:
        model: the model; for a classifier, its backbone is written.
        target: the original repository of the model, or another library.
    Raises:
        CheckpointError: the target does not have the model, or lacks one of its parts.
    """
    part = model.get_submodule("backbone") if "class_scores" in getattr(model, "returns", ()) else model
    form = next((form for form in _FORMATS[target] if form.is_of(part)), None)
    if form is None:
        alike = {
            other.name: [key for key in other.ours if key not in part.state_dict()]
            for other in _FORMATS[target]
            if other.model == type(part).__name__
        }
        if alike:
            name, lacking = min(alike.items(), key=lambda item: len(item[1]))
            raise CheckpointError(
                f"{type(part).__name__}, {target} names: differs from {name}, which has {', '.join(lacking)}. Only a "
                "model of its parts (backbone, neck, head) can be written so."
            )
        backbone = (
            f" on {type(model.get_submodule('backbone')).__name__}"
            if "backbone" in dict(model.named_children())
            else ""
        )
        names = ", ".join(dict.fromkeys(form.name for form in _FORMATS[target]))
        raise CheckpointError(f"{type(model).__name__}{backbone} has no {target} names. Models that have: {names}.")
    state = {key: value.detach().cpu().clone() for key, value in part.state_dict().items()}
    result = form.table.write(dict(state), part)
    left = [key for key in result if form.table.rules and key in state and key.startswith(_OURS)]
    if left:
        raise CheckpointError(f"{form.name}: has no {', '.join(left[:3])} ({len(left)} entries of the model in all).")
    return Written(result, form.name, form.parts)
