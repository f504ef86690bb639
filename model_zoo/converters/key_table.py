"""Tables that translate the entries of a state dict both ways: from another project's names to vitkit's, and back.

A template is a part of a key. `{i}`, `{j}` stand for numbers, `{leaf}` for "weight" or "bias", a leading "^" and a
final "$" for the key's start and end. A leading dot also matches at the start of a key. The rules of a table are
applied in turn for reading, and in reverse order for writing. "ours" are vitkit's names, "theirs" those of the other
project.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Translate = Callable[[State, nn.Module], State]

_KINDS = {"leaf": "weight|bias"}


class Rule(Protocol):
    """One line of a table."""

    def read(self, state: State, model: nn.Module) -> State:
        """Translate to vitkit's names; the state will be loaded into `model`."""

    def write(self, state: State, model: nn.Module) -> State:
        """Translate back to the other project's names; the state was taken from `model`."""


class Rename(NamedTuple):
    """Renames a part of a key, in both directions."""

    theirs: str
    ours: str

    def read(self, state: State, model: nn.Module) -> State:
        """Rename to vitkit's name."""
        return _rename(state, self.theirs, self.ours)

    def write(self, state: State, model: nn.Module) -> State:
        """Rename to the other project's name."""
        return _rename(state, self.ours, self.theirs)


class Alias(NamedTuple):
    """A second spelling of the other project's name, which is read but never written."""

    other: str
    theirs: str

    def read(self, state: State, model: nn.Module) -> State:
        """Rename to the usual spelling of the other project."""
        return _rename(state, self.other, self.theirs)

    def write(self, state: State, model: nn.Module) -> State:
        """Keep everything."""
        return state


class Drop(NamedTuple):
    """Drops entries that follow from the settings, or that vitkit does not use."""

    theirs: str

    def read(self, state: State, model: nn.Module) -> State:
        """Leave out the matching entries."""
        pattern = _pattern(self.theirs)
        return {key: value for key, value in state.items() if not pattern.search(key)}

    def write(self, state: State, model: nn.Module) -> State:
        """Keep everything."""
        return state


class Join(NamedTuple):
    """Joins several entries, such as the projections to queries, keys and values, that are one entry in vitkit."""

    theirs: Sequence[str]
    """Templates of the full keys of the entries to join; `ours` is also a template of a full key."""
    ours: str

    def read(self, state: State, model: nn.Module) -> State:
        """Concatenate the entries along their first axis."""
        state, first = dict(state), _pattern(f"{self.theirs[0]}$")
        for key in list(state):
            if match := first.search(key):
                keys = [_fill(template, match.groupdict()) for template in self.theirs]
                if all(part in state for part in keys):
                    state[_fill(self.ours, match.groupdict())] = torch.cat([state.pop(part) for part in keys])
        return state

    def write(self, state: State, model: nn.Module) -> State:
        """Split vitkit's entry into equal parts along its first axis."""
        state, whole = dict(state), _pattern(f"{self.ours}$")
        for key in list(state):
            if match := whole.search(key):
                parts = state.pop(key).chunk(len(self.theirs))
                for template, part in zip(self.theirs, parts, strict=True):
                    state[_fill(template, match.groupdict())] = part.clone()
        return state


class Custom(NamedTuple):
    """Any other translation, as a pair of functions; None keeps everything."""

    reading: Translate | None = None
    writing: Translate | None = None

    def read(self, state: State, model: nn.Module) -> State:
        """Call `reading`."""
        return self.reading(dict(state), model) if self.reading else state

    def write(self, state: State, model: nn.Module) -> State:
        """Call `writing`."""
        return self.writing(dict(state), model) if self.writing else state


class KeyTable(NamedTuple):
    """The rules that translate between one format and vitkit's names."""

    rules: Sequence[Rule] = ()

    def read(self, state: State, model: nn.Module) -> State:
        """Return the other project's state dict under vitkit's names; it will be loaded into `model`."""
        for rule in self.rules:
            state = rule.read(state, model)
        return state

    def write(self, state: State, model: nn.Module) -> State:
        """Return vitkit's state dict, taken from `model`, under the other project's names."""
        for rule in reversed(self.rules):
            state = rule.write(state, model)
        return state


class Format(NamedTuple):
    """The key names of another project for one of vitkit's models."""

    name: str
    """The format's name in reports."""
    table: KeyTable
    marks: Sequence[str] = ()
    """A set of keys that only this format has, by which files are recognized; a key that begins with a dot may have
    any prefix. Empty if the names are the same as vitkit's."""
    model: str = ""
    """The class of the model that is written in this format (for a classifier, of its backbone); "": only read."""
    ours: Sequence[str] = ()
    """vitkit's keys that distinguish the format's models from others of the same class."""
    parts: tuple[str, ...] = ()
    """The state dicts that a file of this format holds side by side, whose names begin its keys; empty: one."""
    classes: tuple[str, ...] | None = None
    """The classes that the official weights were trained on, in the order of their head; None if they differ."""

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a state dict is of this format."""
        return bool(self.marks) and all(
            any(key == mark[1:] or key.endswith(mark) for key in state) if mark.startswith(".") else mark in state
            for mark in self.marks
        )

    def is_of(self, model: nn.Module) -> bool:
        """Whether a model, or a backbone without a model, can be written in this format."""
        return type(model).__name__ == self.model and set(self.ours) <= model.state_dict().keys()


def below(theirs: str, ours: str, pairs: Sequence[tuple[str, str] | str]) -> Iterator[Rename]:
    """Yield renames of keys that begin with the prefix `theirs` or `ours`.

    Args:
        pairs: the parts after the prefixes, or one text where both are the same.
    """
    for pair in pairs:
        their_part, our_part = (pair, pair) if isinstance(pair, str) else pair
        yield Rename(f"^{theirs}{their_part}", f"^{ours}{our_part}")


def aliases(rules: Sequence[Rule]) -> Iterator[Rule]:
    """Yield rules that only read; they read another spelling of the other project's names."""
    for rule in rules:
        yield Alias(rule.theirs, rule.ours) if isinstance(rule, Rename) else Custom(rule.read)


def prefix_of(model: nn.Module, suffix: str) -> str:
    """Return the part before `suffix` of the first key in the model's state dict that ends with it; "" if none does."""
    return next((key.removesuffix(suffix) for key in model.state_dict() if key.endswith(suffix)), "")


@cache
def _pattern(template: str) -> re.Pattern:
    start = "^" if template.startswith("^") else r"(?:^|\.)" if template.startswith(".") else ""
    end = "$" if template.endswith("$") else ""
    pieces = re.split(r"\{(\w+)\}", template.lstrip("^.").removesuffix("$"))
    text = "".join(
        f"(?P<{piece}>{_KINDS.get(piece, '[0-9]+')})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)
    )
    return re.compile(f"{start}{text}{end}")


def _fill(template: str, values: dict[str, str]) -> str:
    return template.removeprefix("^").removesuffix("$").format(**values)


def _rename(state: State, old: str, new: str) -> State:
    pattern = _pattern(old)

    def replaced(match: re.Match) -> str:
        text = _fill(new, match.groupdict())
        return text.removeprefix(".") if old.startswith(".") and not match[0].startswith(".") else text

    return {pattern.sub(replaced, key): value for key, value in state.items()}
