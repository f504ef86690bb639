"""Overrides from the command line: `key.sub=value`, converted to the type that the key expects."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitkit.config.schema import (
    MISSING,
    TOP_LEVEL,
    Slot,
    element_type,
    fits,
    join_key,
    plain_copy,
    settings_slots,
    slots_in,
)
from vitkit.errors import ConfigError
from vitkit.registry import nearest


def split_override(text: str) -> tuple[str, str]:
    """Split "key.sub=value" into the key and the text of the value.

    Raises:
        ConfigError: the text has no "=" or an empty key.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} does not parse; expected KEY=VALUE, such as train.epochs=2.")
    return key, raw.strip()


def with_overrides(cfg: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a config with `key.sub=value` overrides applied, for use in a config file.

    Raises:
        ConfigError: an override does not parse, or does not fit the config.
    """
    changed = plain_copy(cfg, "")
    for text in overrides:
        apply_override(changed, *split_override(text))
    return changed


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse "name=value,name=value"; values are written as in overrides.

    Raises:
        ConfigError: the text does not parse.
    """
    items = [split_override(item) for item in re.split(r",(?=\s*[A-Za-z_]\w*=)", text)]
    return {name: _literal(raw) for name, raw in items}


def apply_override(cfg: dict[str, Any], key: str, raw: str) -> None:
    """Set one value in `cfg`. Parts that the config omits on the way to the key start from the constructor's defaults.

    Args:
        key: dotted key; lists are indexed by number.
        raw: a Python literal, where `dict(name=value)` is allowed, or true, false, none, or any text.
    Raises:
        ConfigError: the key is unknown (the nearest one is suggested), or does not accept such a value.
    """
    *parents, last = key.split(".")
    node, slot, prefix = cfg, None, ""
    for part in parents:
        slot = _slot_in(slot, node, part, prefix)
        prefix = join_key(prefix, part)
        node = _open(node, part, slot, prefix)
    slot = _slot_in(slot, node, last, prefix)
    index = int(last) if isinstance(node, list) else last
    current = node[index] if isinstance(node, list) else node.get(index)
    node[index] = _value(raw, slot, current, key)


def _slot_in(slot: Slot | None, node: Any, part: str, prefix: str) -> Slot:
    """Return the slot of key `part` below `slot` (None: the config's top level), which contains `node`."""
    slots = TOP_LEVEL if slot is None else slots_in(slot, node, prefix)
    if slot is not None and slot.registry is None and isinstance(node, Mapping):
        slots = slots | settings_slots(slot.annotation)
    if part in slots:
        return slots[part]
    if slot is not None and slot.registry is None and isinstance(node, Mapping) and (slot.any_key or not node):
        return Slot(element_type(slot.annotation, part))
    raise ConfigError(f"{join_key(prefix, part)}: unknown key {part!r}. {nearest(part, slots)}")


def _open(node: dict | list, part: str, slot: Slot, prefix: str) -> dict | list:
    """Return the dict or list at a key, creating it if the config has a name, a tuple or nothing there."""
    index = int(part) if isinstance(node, list) else part
    value = node[index] if isinstance(node, list) or index in node else _default(slot)
    if slot.registry is not None and isinstance(value, str):
        value = {"type": value}
    elif isinstance(value, tuple):
        value = list(value)
    elif value is None and slot.registry is not None:
        raise ConfigError(f"{prefix}: not set, so it has no keys. Set it first: {prefix}=NAME.")
    elif value is None and fits({}, slot.annotation):
        value = {}
    if not isinstance(value, dict | list):
        raise ConfigError(f"{prefix}: is {value!r}, which has no keys to override.")
    node[index] = value
    return value


def _default(slot: Slot) -> Any:
    if slot.default is MISSING:
        return {} if slot.section else None
    return plain_copy(dict(slot.default) if isinstance(slot.default, Mapping) else slot.default, "")


def _value(raw: str, slot: Slot, current: Any, key: str) -> Any:
    """Convert an override's text to the type that its slot expects: a string field may well be set to 2017 or none."""
    if slot.annotation is Any and slot.registry is None and current is not None:
        slot = Slot(float if type(current) is int else type(current))
    try:
        values = (_literal(raw), raw)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    for value in values:
        if slot.accepts(value):
            return value
    raise ConfigError(f"{key}: got {raw!r:.300}; expected {slot.expected}.")


_WORDS = {"true": True, "false": False, "none": None}


class _Literals(ast.NodeTransformer):
    """Convert to literals: calls `dict(name=value)`, as configs use them, and names, as shells remove quotes."""

    def __init__(self, text: str):
        self.text = text

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args
        if not is_dict or not all(keyword.arg for keyword in node.keywords):
            return node
        names = [ast.Constant(keyword.arg) for keyword in node.keywords]
        return ast.Dict(names, [self.visit(keyword.value) for keyword in node.keywords])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        word = ast.get_source_segment(self.text, node)  # node.id is normalized, so it may differ from the text
        return ast.Constant(_WORDS.get(word.lower(), word))


def _literal(raw: str) -> Any:
    """Return the value that a text stands for; the text itself if it is not a literal. Raise a ConfigError if it is
    nested too deeply for Python's parser."""
    try:
        return _parse(raw)
    except (RecursionError, MemoryError) as error:  # MemoryError: the parser's own stack is full
        raise ConfigError(f"got {raw!r:.100} (…): nested too deeply for a value.") from error


def _parse(raw: str) -> Any:
    text = raw.strip()
    try:
        return plain_copy(ast.literal_eval(_Literals(text).visit(ast.parse(text, mode="eval"))), "")
    except (ValueError, SyntaxError, TypeError):
        # A list of texts that are not names, such as file names.
        if raw[:1] + raw[-1:] in ("[]", "()"):
            return [_parse(item.strip()) for item in raw[1:-1].split(",")]
        return raw
