"""Checks a config against the signatures of the classes that it names, before anything is built."""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitkit.config.schema import TOP_LEVEL, Slot, join_key, resolve, settings_slots, slots_in
from vitkit.errors import ConfigError
from vitkit.registry import ChecksArguments, nearest, parameters_of, takes_keywords

COMMAND_LINE = "command line"
_AT_LEAST_ONE = (
    *("num_heads", "num_layers", "num_decoder_layers", "num_queries", "d_model", "embed_dim"),
    *("out_channels", "in_channels", "base_channels", "mask_channels", "patch_size", "max_length", "max_source_length"),
)
_MOST_LAYERS = 1000
"""Largest number of layers or blocks. Building a model of more would take hours and all of the memory, which somebody
else's checkpoint could ask for in its config."""
_OF_THE_TRAINING = ("drop_path", "image_size")
"""Arguments that suit the training and its images rather than the variant, and fit any variant."""


def check_config(cfg: Mapping[str, Any]) -> None:
    """Check every name, argument and value against the registered constructors' signatures, building nothing.

    Raises:
        ConfigError: there are unknown keys, types or arguments, or values of a wrong type; all of them are listed.
    """
    raise_if_any(list(find_issues(cfg)), "config")


def find_issues(cfg: Mapping[str, Any], origins: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield a message for each unknown key, type or argument, for each value of a wrong type, and for an override of
    `data.root` that nothing reads; `origins` are those of a `Config`."""
    if origins.get("data.root") == COMMAND_LINE and not reads_root(cfg):
        yield (
            "data.root: no dataset of this config reads files below it, such as '{root}/train2017', so that it would "
            "change nothing. Leave it out, set the datasets' own paths, or use a config that reads files."
        )
    for key, value in cfg.items():
        if key in TOP_LEVEL:
            yield from _issues_at(key, value, TOP_LEVEL[key], origins)
        else:
            yield f"unknown key {key!r}. {nearest(key, TOP_LEVEL)}"


def reads_root(cfg: Mapping[str, Any]) -> bool:
    """Whether a dataset of a config reads files below `data.root`."""
    return "{root}" in json.dumps(cfg.get("data", {}), default=str)


def _issues_at(key: str, value: Any, slot: Slot, origins: Mapping[str, str]) -> Iterator[str]:
    if not slot.accepts(value):
        yield f"{key}: got {value!r:.300}; expected {slot.expected}."
        return
    name = key.rpartition(".")[2]
    if name.startswith(("num_", "d_")) or name in _AT_LEAST_ONE:
        least = 1 if name in _AT_LEAST_ONE else 0
        if any(number < least for number in _whole_numbers(value)):
            yield f"{key}: got {value!r:.300}; expected at least {least}."
            return
    is_depth = name.endswith(("_layers", "_blocks")) or name in ("depth", "depths")
    if is_depth and any(number > _MOST_LAYERS for number in _whole_numbers(value)):
        yield f"{key}: got {value!r:.300}; expected at most {_MOST_LAYERS}."
        return
    if slot.registry is None:
        slots = settings_slots(slot.annotation)
        for name, item in value.items() if slots and isinstance(value, Mapping) else ():
            if name in slots:
                yield from _issues_at(join_key(key, name), item, slots[name], origins)
            else:
                yield f"{join_key(key, name)}: unknown key {name!r}. {nearest(name, slots)}"
        return
    if isinstance(value, list | tuple):
        for i, item_slot in slots_in(slot, value, key).items():
            yield from _issues_at(join_key(key, i), value[int(i)], item_slot, origins)
        return
    if not isinstance(value, str | Mapping):
        return
    try:
        constructor, arguments = resolve(slot, value, key)
    except ConfigError as error:
        yield str(error)
        return

    slots = slots_in(slot, value, key)
    unknown = [name for name in arguments if name not in slots]
    if origins.get(f"{key}.type") == COMMAND_LINE:
        replaced = [name for name in unknown if not _is_chosen(join_key(key, name), origins)]
        if replaced:
            yield (
                f"{key}: {value['type']} does not take {', '.join(replaced)}, set for the type that it replaces. "
                f"Override the whole {slot.registry.kind} instead: {key}={value['type']}."
            )
        else:
            yield from _find_kept_arguments(key, value, slot, origins)
        unknown = [name for name in unknown if name not in replaced]
    for name in unknown:
        yield f"{join_key(key, name)}: {constructor.__name__} has no argument {name!r}. {nearest(name, slots)}"
    inside = [
        issue
        for name, item in arguments.items()
        if name in slots
        for issue in _issues_at(join_key(key, name), item, slots[name], origins)
    ]
    yield from inside
    # Constraints that a signature cannot express are checked by the class itself, without building anything large.
    if isinstance(constructor, ChecksArguments) and not unknown and not inside:
        check = constructor.check_arguments
        checked = parameters_of(check)
        missing = [p.name for p in checked.values() if p.default is p.empty and p.name not in arguments]
        if not slots.keys() >= set(missing):
            return  # the check of a base class, whose arguments the class sets itself
        if missing:
            yield f"{key}: {constructor.__name__} needs {', '.join(missing)}."
            return
        # A class of a user's may have arguments that the check of its base does not know.
        known = arguments if takes_keywords(check) else {k: value for k, value in arguments.items() if k in checked}
        try:
            check(**known)
        except ConfigError as error:
            yield f"{key}: {error}"


def _find_kept_arguments(key: str, spec: Mapping[str, Any], slot: Slot, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a message if a variant, chosen by its name only, would keep what is set for the type that it replaces."""
    _, presets = resolve(slot, spec["type"], key)
    kept = [
        name
        for name, preset in presets.items()
        if name not in _OF_THE_TRAINING
        and _with_lists(spec.get(name, preset)) != _with_lists(preset)
        and not _is_chosen(join_key(key, name), origins)
    ]
    if kept:
        yield (
            f"{key}: {spec['type']} has {', '.join(f'{name}={presets[name]!r}' for name in kept)}, but "
            f"{', '.join(f'{name}={spec[name]!r}' for name in kept)} would stay, set for the type that it replaces. "
            f"Override the whole {slot.registry.kind} instead: {key}={spec['type']}. To keep them, override them as "
            f"well: {shlex.join(f'{join_key(key, name)}={spec[name]}' for name in kept)}."
        )


def _is_chosen(key: str, origins: Mapping[str, str]) -> bool:
    """Whether the value at a key, or a part of it, is from the command line."""
    below = f"{key}."  # a dict has no origin, only its items
    return any(origin == COMMAND_LINE and f"{other}.".startswith(below) for other, origin in origins.items())


def _with_lists(value: Any) -> Any:
    """Return a value with lists in place of tuples, which mean the same in a config."""
    if isinstance(value, Mapping):
        return {name: _with_lists(item) for name, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _whole_numbers(value: Any) -> list[int]:
    """Return a value, or the items of a list, if they are whole numbers."""
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if type(item) is int]


def raise_if_any(issues: list[str], path: str | Path) -> None:
    """Raise one ConfigError that lists all issues, each once; do nothing if there are none."""
    # A key with a line break would look like two issues.
    issues = list(dict.fromkeys(issue.replace("\n", "\\n") for issue in issues))
    if len(issues) == 1:
        raise ConfigError(f"{path}: {issues[0]}")
    if issues:
        raise ConfigError(f"{path}: {len(issues)} issues:\n" + "\n".join(f"  - {p}" for p in issues))
