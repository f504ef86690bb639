"""Write a resolved config as one complete Python file, to be copied and edited."""

import keyword
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitkit.config.load import Config
from vitkit.errors import ConfigError

_WIDTH = 120


def write_config(cfg: Config, path: str | Path) -> None:
    """Write a config as a Python file without imports, which loads as the same config.

    Raises:
        ConfigError: the file exists, cannot be written, or does not end in .py.
    """
    path = Path(path)
    if path.suffix != ".py":
        raise ConfigError(f"{path}: expected a name that ends in .py for a config.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(as_python(cfg))
    except FileExistsError:
        raise ConfigError(f"{path}: exists, and is not replaced. Choose another name, or delete it.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}). Choose another file.") from error


def as_python(cfg: Config) -> str:
    """Return the text of a Python file with a function `config()` that returns a config.

    Long lists that occur more than once, such as the classes of train and val, become constants.
    """
    repeated = _repeated_lists(cfg)
    constants = {_text(value, {}): name for name, value in repeated.items()}
    lines = [f'"""{cfg.name}, written in full; {cfg.path.name} says what is published."""']
    for name, value in repeated.items():
        lines += ["", f"{name} = [", *_fill([_text(item, {}) for item in value], 4), "]  # fmt: skip"]
    lines += ["", "", "def config():", "    return dict("]
    for key, value in cfg.items():
        lines += _lines(f"{key}=", value, 8, constants)
    return "\n".join([*lines, "    )  # fmt: skip", ""])


def _lines(prefix: str, value: Any, indent: int, constants: Mapping[str, str]) -> list[str]:
    """Return a value as lines: one if it fits, else its items, with plain values sharing lines."""
    text = f"{prefix}{_text(value, constants)},"
    if indent + len(text) <= _WIDTH or not isinstance(value, Mapping | list | tuple):
        return [" " * indent + text]
    opening, closing = _brackets(value)
    lines, short = [f"{' ' * indent}{prefix}{opening}"], []
    for name, item in _items(value):
        text = f"{name}{_text(item, constants)}"
        if not _holds_dicts(item) and indent + 4 + len(text) < _WIDTH:
            short.append(text)
            continue
        lines += [*_fill(short, indent + 4), *_lines(name, item, indent + 4, constants)]
        short = []
    return [*lines, *_fill(short, indent + 4), f"{' ' * indent}{closing},"]


def _text(value: Any, constants: Mapping[str, str]) -> str:
    """Return a value as an expression in one line."""
    if isinstance(value, Mapping | list | tuple):
        opening, closing = _brackets(value)
        inside = ", ".join(f"{name}{_text(item, constants)}" for name, item in _items(value))
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = f"{opening}{inside}{comma}{closing}"
        return constants.get(text, text)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str) and '"' not in value:
        return f'"{repr(value + chr(34))[1:-2]}"'  # repr() takes the quotes that a text does not have
    return repr(value)


def _brackets(value: Mapping | list | tuple) -> tuple[str, str]:
    if isinstance(value, Mapping):
        return ("dict(", ")") if _are_names(value) else ("{", "}")
    return ("[", "]") if isinstance(value, list) else ("(", ")")


def _items(value: Mapping | list | tuple) -> list[tuple[str, Any]]:
    """Return the items of a dict or list, each with the text that precedes it."""
    if isinstance(value, Mapping):
        are_names = _are_names(value)
        return [(f"{key}=" if are_names else f"{_text(key, {})}: ", item) for key, item in value.items()]
    return [("", item) for item in value]


def _are_names(value: Mapping) -> bool:
    return all(key.isidentifier() and not keyword.iskeyword(key) for key in value)


def _holds_dicts(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _fill(texts: Sequence[str], indent: int) -> list[str]:
    """Fill lines with texts, separated by commas."""
    lines = []
    for text in texts:
        if lines and len(lines[-1]) + len(text) + 2 <= _WIDTH:
            lines[-1] += f" {text},"
        else:
            lines.append(f"{' ' * indent}{text},")
    return lines


def _repeated_lists(cfg: Mapping[str, Any]) -> dict[str, list]:
    """Return the long lists of plain values that occur more than once, by the first key that has one."""
    repeated, seen = {}, []
    for key, value in _lists_in(cfg):
        if len(_text(value, {})) > _WIDTH:
            if value in seen and value not in repeated.values() and key.isidentifier():
                repeated.setdefault(key.upper(), value)
            seen.append(value)
    return repeated


def _lists_in(value: Mapping[str, Any]) -> Iterator[tuple[str, list]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _lists_in(item)
        elif isinstance(item, list) and not any(isinstance(each, Mapping | list | tuple) for each in item):
            yield key, item
