"""Overrides from the command line: `key.sub=value`, typed by what the key may hold."""

import ast
from collections.abc import Mapping
from typing import Any

from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.schema import (
    MISSING,
    TOP_LEVEL,
    Place,
    element_type,
    fits,
    join_key,
    places_in,
    plain_copy,
    settings_places,
)


def split_override(text: str) -> tuple[str, str]:
    """Key and value text of "key.sub=value".

    Raises:
        ConfigError: the text has no "=" or an empty key.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} does not parse; expected KEY=VALUE, such as train.epochs=2.")
    return key, raw.strip()


def apply_override(cfg: dict[str, Any], key: str, raw: str) -> None:
    """Sets one value in `cfg`. What the config omits on the way to it starts from the constructor's defaults.

    Args:
        key: dotted; lists are indexed by number.
        raw: a Python literal, true, false, none, or any text.
    Raises:
        ConfigError: the key is unknown (the nearest is named), or its place takes no such value.
    """
    *parents, last = key.split(".")
    node, place, where = cfg, None, ""
    for part in parents:
        place = _place_in(place, node, part, where)
        where = join_key(where, part)
        node = _open(node, part, place, where)
    place = _place_in(place, node, last, where)
    slot = int(last) if isinstance(node, list) else last
    current = node[slot] if isinstance(node, list) else node.get(slot)
    node[slot] = _value(raw, place, current, key)


def _place_in(place: Place | None, node: Any, part: str, where: str) -> Place:
    """The place of key `part` below `place` (None: the config's top), which holds `node`."""
    known = TOP_LEVEL if place is None else places_in(place, node, where)
    if place is not None and place.registry is None and isinstance(node, Mapping):
        known = known | settings_places(place.annotation)
    if part in known:
        return known[part]
    if node == {} and place is not None and place.registry is None:
        return Place(element_type(place.annotation, part))  # an empty dict takes any key
    raise ConfigError(f"{join_key(where, part)}: unknown key {part!r}. {nearest(part, known)}")


def _open(node: dict | list, part: str, place: Place, where: str) -> dict | list:
    """The dict or list at a key, put there first where the config has a name, a tuple or nothing."""
    slot = int(part) if isinstance(node, list) else part
    value = node[slot] if isinstance(node, list) or slot in node else _default(place)
    if place.registry is not None and isinstance(value, str):
        value = {"type": value}
    elif isinstance(value, tuple):
        value = list(value)
    elif value is None and place.registry is not None:
        raise ConfigError(f"{where}: nothing is set here. Choose one first: {where}=NAME.")
    elif value is None and fits({}, place.annotation):
        value = {}
    if not isinstance(value, dict | list):
        raise ConfigError(f"{where}: holds {value!r}, which has no keys to override.")
    node[slot] = value
    return value


def _default(place: Place) -> Any:
    if place.default is MISSING:
        return {} if place.section else None
    return plain_copy(dict(place.default) if isinstance(place.default, Mapping) else place.default, "")


def _value(raw: str, place: Place, current: Any, key: str) -> Any:
    """An override's text as the type that its place wants: a string field may well be given 2017 or none."""
    if place.annotation is Any and place.registry is None and current is not None:
        place = Place(float if type(current) is int else type(current))
    for value in (_literal(raw), raw):
        if place.accepts(value):
            return value
    raise ConfigError(f"{key}: got {raw!r} on the command line; expected {place.expected}.")


def _literal(raw: str) -> Any:
    names = {"true": True, "false": False, "none": None}
    if raw.lower() in names:
        return names[raw.lower()]
    try:
        return plain_copy(ast.literal_eval(raw), "")
    except (ValueError, SyntaxError, TypeError):
        # A shell eats quotes: [res4,res5] means a list of two names.
        if raw[:1] + raw[-1:] in ("[]", "()"):
            return [_literal(item.strip()) for item in raw[1:-1].split(",")]
        return raw
