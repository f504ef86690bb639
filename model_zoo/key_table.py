"""Tables that translate the entries of a state dict both ways: from another project's names to vitkit's, and back.

A template is a part of a key. `{i}`, `{j}` stand for numbers, `{leaf}` for "weight" or "bias", and a leading "^" for
the key's start. The rules of a table are applied in turn for reading, and in reverse order for writing. "ours" are
vitkit's names, "theirs" those of the other project.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitkit.model_zoo.converter import State

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
        return _renamed(state, self.theirs, self.ours)

    def write(self, state: State, model: nn.Module) -> State:
        """Rename to the other project's name."""
        return _renamed(state, self.ours, self.theirs)


class Alias(NamedTuple):
    """A second spelling of the other project's name, which is read but never written."""

    other: str
    theirs: str

    def read(self, state: State, model: nn.Module) -> State:
        """Rename to the usual spelling of the other project."""
        return _renamed(state, self.other, self.theirs)

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
                keys = [_filled(template, match.groupdict()) for template in self.theirs]
                if all(part in state for part in keys):
                    state[_filled(self.ours, match.groupdict())] = torch.cat([state.pop(part) for part in keys])
        return state

    def write(self, state: State, model: nn.Module) -> State:
        """Split vitkit's entry into equal parts along its first axis."""
        state, whole = dict(state), _pattern(f"{self.ours}$")
        for key in list(state):
            if match := whole.search(key):
                parts = state.pop(key).chunk(len(self.theirs))
                for template, part in zip(self.theirs, parts, strict=True):
                    state[_filled(template, match.groupdict())] = part.clone()
        return state


class Custom(NamedTuple):
    """Any other translation, as a pair of functions."""

    reading: Callable[[State, nn.Module], State]
    writing: Callable[[State, nn.Module], State]

    def read(self, state: State, model: nn.Module) -> State:
        """Call `reading`."""
        return self.reading(dict(state), model)

    def write(self, state: State, model: nn.Module) -> State:
        """Call `writing`."""
        return self.writing(dict(state), model)


class KeyTable(NamedTuple):
    """The rules that translate between one format and vitkit's names."""

    rules: Sequence[Rule]

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


def below(theirs: str, ours: str, pairs: Sequence[tuple[str, str]]) -> Iterator[Rename]:
    """Yield renames of keys that begin with the prefix `theirs` or `ours`; `pairs` are the parts after the prefixes."""
    for their_piece, our_piece in pairs:
        yield Rename(f"^{theirs}{their_piece}", f"^{ours}{our_piece}")


def aliases(rules: Sequence[Rule]) -> Iterator[Rule]:
    """Yield rules that only read; they read another spelling of the other project's names."""
    for rule in rules:
        yield Alias(rule.theirs, rule.ours) if isinstance(rule, Rename) else Custom(rule.read, lambda state, _: state)


def _pattern(template: str) -> re.Pattern:
    anchored, end = template.startswith("^"), template.endswith("$")
    pieces = re.split(r"\{(\w+)\}", template.removeprefix("^").removesuffix("$"))
    text = "".join(
        f"(?P<{piece}>{_KINDS.get(piece, '[0-9]+')})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)
    )
    return re.compile(f"{'^' if anchored else ''}{text}{'$' if end else ''}")


def _filled(template: str, values: dict[str, str]) -> str:
    return template.removeprefix("^").removesuffix("$").format(**values)


def _renamed(state: State, old: str, new: str) -> dict[str, Tensor]:
    pattern = _pattern(old)
    return {pattern.sub(lambda match: _filled(new, match.groupdict()), key): value for key, value in state.items()}
