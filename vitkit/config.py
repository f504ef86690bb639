"""Configs: plain Python files that return nested dicts, checked whole before anything is built from them."""

import hashlib
import importlib
import importlib.util
import json
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitkit.errors import ConfigError
from vitkit.overrides import apply_override, split_override
from vitkit.registry import nearest, parameters_of
from vitkit.schema import MISSING, TOP_LEVEL, Place, join_key, places_in, plain_copy, resolve

COMMAND_LINE = "command line"


class Config(dict):
    """A resolved config: nested dicts and lists of plain values.

    Attributes:
        path: the file it was loaded from.
        origins: where each value was set, by dotted key: the file's path or "command line".
    """

    def __init__(self, values: Mapping[str, Any], *, path: str | Path, overridden: Sequence[str] = ()):
        super().__init__(values)
        self.path = Path(path)
        self.origins = {
            key: COMMAND_LINE if any(_within(key, other) or _within(other, key) for other in overridden) else str(path)
            for key, _ in _leaves(self)
        }


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check: bool = True) -> Config:
    """Loads a config file, applies overrides, and checks the result.

    Args:
        path: a Python file with a function `config()` that returns nested dicts, or a config saved as `.json`. A path
            below `configs/` that is not there is looked for among the installed configs.
        overrides: "key.sub=value" each, applied in order. Values are Python literals (`true`, `false` and `none` too),
            anything else is a string; a list's item is named by its index.
        check: whether `check_config` runs.
    Raises:
        ConfigError: the file is missing or wrong, or keys, types or values do not fit; all problems are listed.
    """
    path = _find(Path(path))
    cfg = plain_copy(_read(path), "")
    overrides = [split_override(text) for text in overrides]
    problems = []

    # Files named in `imports` register classes, which the other overrides are then read against.
    for stage in (True, False):
        for key, raw in overrides:
            if (key.split(".")[0] == "imports") is stage:
                try:
                    apply_override(cfg, key, raw)
                except ConfigError as error:
                    problems.append(str(error))
        if stage:
            from_command_line = any(key.split(".")[0] == "imports" for key, _ in overrides)
            _import_user_files(cfg, Path.cwd() if from_command_line else path.parent)

    cfg = Config(cfg, path=path, overridden=[key for key, _ in overrides])
    _raise_if_any(problems + (list(_problems(cfg)) if check else []), path)
    return cfg


def check_config(cfg: Mapping[str, Any]) -> None:
    """Checks every name, argument and value against the registered constructors' signatures; builds nothing.

    Raises:
        ConfigError: an unknown key, type or argument, or a value of the wrong type; all of them are listed.
    """
    _raise_if_any(list(_problems(cfg)), getattr(cfg, "path", "config"))


def save_config(cfg: Mapping[str, Any], path: str | Path) -> None:
    """Writes a config as JSON (tuples become lists); `load_config` reads it back."""
    Path(path).write_text(json.dumps(cfg, indent=2) + "\n", encoding="utf-8")


def cfg_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose values differ between two configs, or that only one has; a tuple equals its list."""
    old, new = (json.loads(json.dumps(cfg)) for cfg in (old, new))
    old, new = dict(_leaves(old)), dict(_leaves(new))
    return sorted(key for key in old.keys() | new.keys() if old.get(key, MISSING) != new.get(key, MISSING))


def format_config(cfg: Config) -> str:
    """A listing of a checked config: every value, omitted arguments with their defaults too, and where it was set."""
    lines = [line for key, value in cfg.items() for line in _lines(cfg, key, value, TOP_LEVEL[key])]
    # A few very long values shall not push all comments out of sight.
    column = max((len(text) for text, _ in lines if len(text) <= 60), default=0)
    return "\n".join(f"{text:<{column}}  # {origin}" if origin else text for text, origin in lines)


def _find(path: Path) -> Path:
    """The file; "configs/detr_r50.py" is also found among the installed configs, where no such folder is at hand."""
    if not path.exists() and path.parts[:1] == ("configs",):
        package = importlib.util.find_spec("vitkit.configs")
        folders = package.submodule_search_locations or [] if package else []
        return next((found for folder in folders if (found := Path(folder, *path.parts[1:])).is_file()), path)
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        names = [p.name for p in path.parent.glob("*") if p.suffix in (".py", ".json") and p.name != "__init__.py"]
        raise ConfigError(f"no config file {str(path)!r}. {nearest(path.name, names)}")
    if path.suffix == ".json":
        try:
            cfg = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not a saved config: {error}.") from error
    else:
        function = getattr(_run(path), "config", None)
        if not callable(function):
            raise ConfigError(f"{path}: has no function config(); a config file defines one that returns a dict.")
        with _naming_line(path):
            cfg = function()
    if not isinstance(cfg, dict):
        raise ConfigError(f"{path}: got {type(cfg).__name__} from config(); expected a dict.")
    return cfg


@contextmanager
def _naming_line(path: Path) -> Iterator[None]:
    """Turns any exception from a user's file into a ConfigError that names the file's line."""
    try:
        yield
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else "?"
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error


def _run(path: Path) -> types.ModuleType:
    """Runs a Python file as a module of its own; its folder does not become importable."""
    name = f"vitkit_user_{path.stem}_{hashlib.sha1(str(path.resolve()).encode()).hexdigest()[:12]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    with _naming_line(path):
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def _import_user_files(cfg: dict[str, Any], folder: Path) -> None:
    """Imports what `imports` names, and makes its paths absolute so that the saved config finds them from anywhere."""
    if not TOP_LEVEL["imports"].accepts(cfg.get("imports", [])):
        return  # reported by the check
    for i, name in enumerate(cfg.get("imports", [])):
        if not name.endswith(".py"):
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ConfigError(
                    f"imports.{i}: importing {name!r} failed: {type(error).__name__}: {error}. "
                    "Name an installed module, or a file that ends in .py."
                ) from error
            continue
        path = (folder / name).resolve()
        if not path.is_file():
            raise ConfigError(f"imports.{i}: no file {str(path)!r}; relative paths start at {str(folder)!r}.")
        _run(path)
        cfg["imports"] = [*cfg["imports"][:i], str(path), *cfg["imports"][i + 1 :]]


def _problems(cfg: Mapping[str, Any]) -> Iterator[str]:
    for key, value in cfg.items():
        if key in TOP_LEVEL:
            yield from _problems_at(key, value, TOP_LEVEL[key], getattr(cfg, "origins", {}))
        else:
            yield f"unknown key {key!r}. {nearest(key, TOP_LEVEL)}"


def _problems_at(key: str, value: Any, place: Place, origins: Mapping[str, str]) -> Iterator[str]:
    if not place.accepts(value):
        yield f"{key}: got {value!r}; expected {place.expected}."
        return
    if place.registry is None:
        return
    if isinstance(value, list | tuple):
        for i, item_place in places_in(place, value, key).items():
            yield from _problems_at(join_key(key, i), value[int(i)], item_place, origins)
        return
    if not isinstance(value, str | Mapping):
        return
    try:
        constructor, given = resolve(place, value, key)
    except ConfigError as error:
        yield str(error)
        return

    known = places_in(place, value, key)
    unknown = [name for name in given if name not in known]
    if origins.get(f"{key}.type") == COMMAND_LINE:
        stale = [name for name in unknown if origins.get(join_key(key, name)) != COMMAND_LINE]
        if stale:
            yield (
                f"{key}: {value['type']} does not take {', '.join(stale)}, set for the type that it replaces. "
                f"Override the whole {place.registry.kind} instead: {key}={value['type']}."
            )
        unknown = [name for name in unknown if name not in stale]
    for name in unknown:
        yield f"{join_key(key, name)}: {constructor.__name__} has no argument {name!r}. {nearest(name, known)}"
    inside = [
        problem
        for name, item in given.items()
        if name in known
        for problem in _problems_at(join_key(key, name), item, known[name], origins)
    ]
    yield from inside
    # What a signature does not say, a class may check itself, without building anything large.
    check = getattr(constructor, "check_arguments", None)
    if check is not None and not unknown and not inside:
        missing = [p.name for p in parameters_of(check).values() if p.default is p.empty and p.name not in given]
        if missing:
            yield f"{key}: {constructor.__name__} needs {', '.join(missing)}."
            return
        try:
            check(**given)
        except ConfigError as error:
            yield f"{key}: {error}"


def _raise_if_any(problems: list[str], path: str | Path) -> None:
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        raise ConfigError(f"{path}: {problems[0]}")
    if problems:
        raise ConfigError(f"{path}: {len(problems)} problems:\n" + "\n".join(f"  - {p}" for p in problems))


def _lines(
    cfg: Config, key: str, value: Any, place: Place, depth: int = 0, origin: str | None = None
) -> Iterator[tuple[str, str]]:
    """The text and origin of each line of `format_config` for one key and all below it."""
    indent, name = "    " * depth, key.rpartition(".")[2]
    if place.registry is not None and isinstance(value, str | Mapping):
        _, given = resolve(place, value, key)
        chosen = "" if place.section else f" {value if isinstance(value, str) else value['type']}"
        own = origin or cfg.origins.get(key) or cfg.origins.get(f"{key}.type", "")
        yield f"{indent}{name}:{chosen}", own
        for argument, below in places_in(place, value, key).items():
            sub = join_key(key, argument)
            if argument in given:
                set_here = isinstance(value, Mapping) and argument in value
                below_origin = origin if set_here else f"variant{chosen}"
                yield from _lines(cfg, sub, given[argument], below, depth + 1, below_origin)
            elif argument != "type" and below.default is not MISSING:
                yield from _lines(cfg, sub, below.default, below, depth + 1, "default")
    elif value and (isinstance(value, Mapping) or (place.registry is not None and isinstance(value, list | tuple))):
        yield f"{indent}{name}:", ""
        for part, below in places_in(place, value, key).items():
            item = value[part] if isinstance(value, Mapping) else value[int(part)]
            yield from _lines(cfg, join_key(key, part), item, below, depth + 1, origin)
    else:
        yield f"{indent}{name} = {value!r}", origin or cfg.origins.get(key, "")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is no dict; lists are opened only where they hold dicts."""
    if isinstance(value, Mapping) and (value or not key):
        for name, item in value.items():
            yield from _leaves(item, join_key(key, name))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _leaves(item, join_key(key, i))
    else:
        yield key, value


def _within(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.")
