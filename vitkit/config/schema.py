"""The values that each config key accepts, determined from the signatures of the registered constructors."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from vitkit.errors import ConfigError
from vitkit.registry import DATASETS, HOOKS, REGISTRIES, SECTIONS, Registry, Spec, constructors_in, parameters_of

MISSING = inspect.Parameter.empty
_LISTS = (list, tuple, Sequence, Collection, Iterable)
_DICTS = (dict, Mapping)
_UNIONS = (Union, types.UnionType)
_MOST_BITS = 63
"""Bits of the largest whole number in a config, apart from its sign: tensors take no larger one."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """The values that a config key accepts."""

    annotation: Any = Any
    default: Any = MISSING
    """The value of an omitted key: the variant's preset, or the constructor's default."""
    registry: Registry | None = None
    """The registry of the spec (or list of specs) that the key accepts; None for plain values."""
    section: str | None = None
    """The name in `registry` that a dict here stands for; sections have no `type`."""
    any_key: bool = False
    """Whether a dict here may have any key, such as a class's name. Otherwise overrides only change the keys that it
    has, so that a misspelled one is an error."""

    def accepts(self, value: Any) -> bool:
        """Return whether the value has the right type. The contents of a spec are checked key by key instead."""
        if self.registry is not None and isinstance(value, Mapping if self.section else str | Mapping):
            return not _is_list(self.annotation)
        return fits(value, self.annotation)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the values that a `Literal` lists; none for another annotation."""
        return typing.get_args(self.annotation) if typing.get_origin(self.annotation) is Literal else ()

    @property
    def expected(self) -> str:
        """Return a description of the expected type, for error messages."""
        if self.section:
            return "a dict of settings"
        if self.registry is not None and self.annotation in (Spec, Any):
            return f"a {self.registry.kind}'s name or a dict(type=...)"
        if self.registry is not None and _is_list(self.annotation):
            return f"a list, of which each item is a {self.registry.kind}'s name or a dict(type=...)"
        return type_name(self.annotation)


TOP_LEVEL = {
    kind: Slot(Spec, registry=REGISTRIES[kind]) for kind in ("model", "criterion", "optimizer", "schedule", "evaluator")
} | {
    "data": Slot(Mapping, registry=SECTIONS, section="data"),
    "train": Slot(Mapping, registry=SECTIONS, section="train"),
    "imports": Slot(Sequence[str]),
}


def slots_in(slot: Slot, value: Any, key: str) -> dict[str, Slot]:
    """Return the keys allowed below a config value: a spec's arguments, a dict's keys, a list's indices.

    Args:
        value: the value at `slot`.
        key: the dotted key of the value, for errors.
    Raises:
        ConfigError: the value is a spec without `type`, or with an unknown one.
    """
    if isinstance(value, list | tuple):
        if slot.registry is not None:
            return {str(i): Slot(Spec, registry=slot.registry) for i in range(len(value))}
        return {str(i): Slot(element_type(slot.annotation, i)) for i in range(len(value))}
    if slot.registry is not None:
        constructor, arguments = resolve(slot, value, key)
        slots = _argument_slots(slot.registry, constructor, arguments)
        return slots if slot.section else {"type": Slot(str), **slots}
    if isinstance(value, Mapping):
        return {name: Slot(element_type(slot.annotation, name)) for name in value}
    return {}


def resolve(slot: Slot, value: Any, key: str) -> tuple[Callable, dict[str, Any]]:
    """Return the constructor of the spec or section at `slot`, and its arguments, including a variant's presets.

    Raises:
        ConfigError: the value has no `type`, or the type is unknown.
    """
    return slot.registry.resolve({"type": slot.section, **value} if slot.section else value, key)


def settings_slots(annotation: Any) -> dict[str, Slot]:
    """Return the keys of an argument annotated as a `TypedDict`, or as a dict or a dataclass of settings,
    `Mapping[...] | Settings`; an empty dict for other annotations."""
    for member in _members(annotation):
        if dataclasses.is_dataclass(member):
            hints = typing.get_type_hints(member)
            return {field.name: Slot(hints[field.name], field.default) for field in dataclasses.fields(member)}
        if typing.is_typeddict(member):
            return {name: Slot(hint) for name, hint in typing.get_type_hints(member).items()}
    return {}


def _is_list(annotation: Any) -> bool:
    """Whether only lists, or None, have an annotated type."""
    members = [member for member in _members(annotation) if member not in (None, type(None))]
    return all((typing.get_origin(member) or member) in _LISTS for member in members)


def _members(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)


def _argument_slots(registry: Registry, constructor: Callable, arguments: Mapping[str, Any]) -> dict[str, Slot]:
    hints = {}
    for accepting in reversed(constructors_in(constructor)):
        hints |= _hints_of(accepting.__init__ if isinstance(accepting, type) else accepting)
    factories = {
        field.name: field.default_factory
        for field in (dataclasses.fields(constructor) if dataclasses.is_dataclass(constructor) else ())
        if field.default_factory is not dataclasses.MISSING
    }
    slots = {}
    for name, parameter in parameters_of(constructor).items():
        default = factories[name]() if name in factories else parameter.default
        annotation = hints.get(name, Any if default in (MISSING, None) else type(default))
        kind = _kind_of(name, annotation, registry)
        # Without a default that names keys, and without settings, a dict's keys are the user's.
        any_key = default is None and fits({}, annotation) and not settings_slots(annotation)
        slots[name] = Slot(annotation, arguments.get(name, default), registry=kind, any_key=any_key)
    if registry is DATASETS:
        for name, kind in (("fraction", float), ("fraction_seed", int)):  # allowed for any dataset, see DataSettings
            slots[name] = Slot(kind | None, arguments.get(name))
    return slots


def slots_of(function: Callable) -> dict[str, Slot]:
    """Return the arguments of a config's function, which take plain values."""
    hints = _hints_of(function)
    return {
        name: Slot(hints.get(name, Any if p.default in (MISSING, None) else type(p.default)), p.default)
        for name, p in parameters_of(function).items()
    }


def _hints_of(function: Callable) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}  # names that only a type checker can resolve: such arguments are treated as unannotated


def _kind_of(name: str, annotation: Any, owner: Registry) -> Registry | None:
    """Return the registry of the specs that an argument accepts, or None if it accepts something else."""
    if not fits("name", annotation) and not fits(["name"], annotation):
        return None  # for instance `transforms: list[dict]` of another library's transforms
    if owner is SECTIONS:
        return {"train": DATASETS, "val": DATASETS, "test": DATASETS, "hooks": HOOKS}.get(name)
    return REGISTRIES.get(name)


def element_type(annotation: Any, key: int | str) -> Any:
    """Return the annotation of the elements of a list or dict; Any if the annotation does not specify it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return element_type(arguments[0], key)
    if origin in _UNIONS:
        kinds = _DICTS if isinstance(key, str) else _LISTS
        members = [a for a in arguments if (typing.get_origin(a) or a) in kinds]
        return element_type(members[0], key) if members else Any
    if not arguments:
        return Any
    if origin is tuple and arguments[-1] is not ...:
        return arguments[int(key)] if int(key) < len(arguments) else Any
    if origin in _LISTS:
        return arguments[0]
    return arguments[1] if origin in _DICTS else Any


def fits(value: Any, annotation: Any) -> bool:
    """Return whether a config's value has an annotated type: an int is also a float, and lists equal tuples."""
    if annotation in (Any, MISSING, object):
        return True
    if annotation in (None, type(None)):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)

    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return fits(value, arguments[0])
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in _UNIONS:
        return any(fits(value, member) for member in arguments)
    if (origin or annotation) in _LISTS:
        return isinstance(value, list | tuple) and _elements_fit(value, origin, arguments)
    if (origin or annotation) in _DICTS or typing.is_typeddict(annotation):
        if not isinstance(value, Mapping):
            return False
        return not arguments or all(fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items())
    if isinstance(annotation, type) and origin is None:
        return annotation in type(value).__mro__  # isinstance() rejects protocols
    # TypeVars and the like do not restrict the value; configs never contain a Callable[...] or type[...].
    return origin is None


def _elements_fit(values: Sequence, origin: Any, arguments: tuple) -> bool:
    if not arguments:
        return True
    if origin is tuple and arguments[-1] is not ...:
        return len(values) == len(arguments) and all(map(fits, values, arguments))
    return all(fits(value, arguments[0]) for value in values)


def type_name(annotation: Any) -> str:
    """Return the text for an annotation in error messages."""
    if typing.get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) in _UNIONS:
        # Paths are strings in a config.
        return " or ".join(type_name(member) for member in typing.get_args(annotation) if member is not Path)
    if annotation in (None, type(None)):
        return "None"
    return inspect.formatannotation(annotation).replace("collections.abc.", "").replace("typing.", "")


def plain_copy(value: Any, key: str) -> Any:
    """Return a copy of a config's value that is not shared with other configs.

    Raises:
        ConfigError: it contains something other than plain values, which could not be saved.
    """
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise ConfigError(f"{key or 'config'}: got the key {name!r}; keys must be strings.")
        return {name: plain_copy(item, join_key(key, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [plain_copy(item, join_key(key, i)) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if type(value) is int and value.bit_length() > _MOST_BITS:
        raise ConfigError(f"{key}: got a whole number of {value.bit_length()} bits; expected at most {_MOST_BITS}.")
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"{key}: got {value!r:.300} ({type(value).__name__}); "
        "expected plain values only: numbers, strings, lists, dicts and None."
    )


def join_key(key: str, name: str | int) -> str:
    """Return the dotted key of `name` below `key`."""
    return f"{key}.{name}" if key else str(name)
