"""Loads configs: plain Python files that return nested dicts, checked completely before anything is built from them."""

import ast
import hashlib
import importlib
import json
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from vitkit import model_zoo
from vitkit.config.check import COMMAND_LINE, find_issues, raise_if_any
from vitkit.config.local_imports import folder_of, importable
from vitkit.config.names import CONFIG_SUFFIXES, ConfigSource, config_names, family_names, find_config
from vitkit.config.overrides import apply_override, split_override
from vitkit.config.schema import MISSING, TOP_LEVEL, join_key, plain_copy, slots_of
from vitkit.config.trust import ImportedCode, remember, require_trust
from vitkit.errors import ConfigError
from vitkit.io.atomic import write_atomically
from vitkit.registry import nearest, unknown

_DATA_SUFFIXES = (".yaml", ".yml")
"""Endings of files that describe YOLO's data, which people take for a config."""


class Config(dict):
    """A resolved config: nested dicts and lists of plain values.

    Attributes:
        path: the file that the config was loaded from.
        name: what the config is called: the file's name, or that of a member of its family.
        origins: where each value was set, by dotted key: the file's path or "command line".
    """

    def __init__(
        self, values: Mapping[str, Any], *, path: str | Path, name: str | None = None, overridden: Sequence[str] = ()
    ):
        super().__init__(values)
        self.path = Path(path)
        self.name = name or self.path.stem
        self.origins = {
            key: COMMAND_LINE if any(_within(key, other) or _within(other, key) for other in overridden) else str(path)
            for key, _ in _leaves(self)
        }


def load_config(path: str | Path, overrides: Sequence[str] = (), *, check: bool = True, trust: bool = False) -> Config:
    """Load a config file, apply overrides, and check the result.

    Args:
        path: a file, .py with a function `config()` that returns nested dicts, or .json as saved; or the name of an
            installed config, such as "detr_r50", "dfine_s_coco" or "quickstart/detr"; or either with arguments of
            `config`, "mask2former:backbone=swin_tiny,data=ade20k"; see `find_config`.
        overrides: "key.sub=value" each, applied in order. Values are Python literals (also `true`, `false` and `none`),
            anything else is a string; items of a list are addressed by index.
        check: whether to run `check_config`.
        trust: let a saved config (.json) import the code listed in `imports`, now and later, see `vitkit.config.trust`.
            A config file in Python, and overrides, are the user's own: what they import is trusted.
    Raises:
        ConfigError: the file is missing or invalid, or arguments, keys, types or values do not fit; all issues are
            listed. Or it is a saved config that imports code which the user has neither run nor trusted.
    """
    source = find_config(path)
    if source is None:
        raise _not_found(Path(path))
    is_saved = source.file.suffix == ".json"
    return _resolve(_read(source), source, overrides, is_saved=is_saved, check=check, trust=trust)


def load_saved_config(text: str, path: str | Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Config:
    """Load a config from JSON text stored in a checkpoint; otherwise like `load_config`.

    Args:
        text: JSON of a resolved config.
        path: the file that contained it, for messages.
    """
    source = ConfigSource(Path(path).stem, Path(path))
    return _resolve(_parse(text, path), source, overrides, is_saved=True, check=True, trust=trust)


def _resolve(
    values: Mapping[str, Any],
    source: ConfigSource,
    overrides: Sequence[str],
    *,
    is_saved: bool,
    check: bool,
    trust: bool,
) -> Config:
    """Apply overrides to a config, import the code that it lists, and check it."""
    path = source.file
    try:
        cfg = plain_copy(values, "")
    except RecursionError as error:
        raise ConfigError(f"{path}: its values are nested too deeply for a config.") from error
    overrides = [split_override(text) for text in overrides]
    issues = []

    # Files listed in `imports` register classes, which the other overrides may refer to.
    for stage in (True, False):
        for key, raw in overrides:
            if (key.split(".")[0] == "imports") is stage:
                try:
                    apply_override(cfg, key, raw)
                except ConfigError as error:
                    issues.append(f"{error}{_hint(source, key, raw)}")
        if stage:
            named = {key for key, _ in overrides}
            from_command_line = any(key.split(".")[0] == "imports" for key in named)
            folder = Path.cwd() if from_command_line else path.parent
            code = _read_imported_code(cfg, folder, is_saved=is_saved and not from_command_line)
            own = [item for item in code if not is_saved or named & {"imports", item.key}]
            if not trust:
                require_trust([item for item in code if item not in own], path)
            _import_code(code, own, path=path, trust=trust)
            if code:
                remember(code, own=own)
                # Paths are made absolute, so that they are valid for the saved config in any working directory.
                cfg["imports"] = [item.name for item in code]

    cfg = Config(cfg, path=path, name=source.name, overridden=[key for key, _ in overrides])
    raise_if_any(issues + (list(find_issues(cfg, cfg.origins)) if check else []), path)
    return cfg


def _hint(source: ConfigSource, key: str, raw: str) -> str:
    """Return what to write for an override of a key that no config has, if it is an argument of the config's function;
    "" otherwise."""
    if key in TOP_LEVEL or source.file.suffix != ".py":
        return ""
    functions = [node for node in ast.parse(source.file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    arguments = [a.arg for node in functions if node.name == "config" for a in (*node.args.args, *node.args.kwonlyargs)]
    if key not in arguments:
        return ""
    names = (name for name in (*family_names(), *config_names()) if find_config(name).file == source.file)
    values = ",".join(f"{name}={value}" for name, value in {**source.arguments, key: raw}.items())
    return f" It is an argument of the config's function: {next(names, source.file)}:{values}"


def save_config(cfg: Mapping[str, Any], path: str | Path) -> None:
    """Write a config as JSON (tuples become lists); `load_config` can read it."""
    text = json.dumps(cfg, indent=2) + "\n"
    write_atomically(Path(path), lambda file: file.write(text.encode()), sync=False)


def cfg_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ between two configs, or that only one has; a tuple equals its list."""
    old, new = (json.loads(json.dumps(cfg)) for cfg in (old, new))
    old, new = dict(_leaves(old)), dict(_leaves(new))
    return sorted(key for key in old.keys() | new.keys() if old.get(key, MISSING) != new.get(key, MISSING))


def value_at(cfg: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, in which items of lists have their index; `default` if there is none."""
    value = cfg
    for part in key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list | tuple) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return dict(_leaves(cfg)).get(key, default)  # names may have dots, as in optimizer.lr_multipliers
    return value


def _not_found(path: Path) -> ConfigError:
    """Return the error for a path or a name of which there is no config."""
    if isdir(path):
        return ConfigError(f"{str(path)!r} is a folder; expected a config file. A run's is config.json in its folder.")
    if isfile(path):
        remedy = f" To train on its images, use `vitkit start {path}`." * (path.suffix.lower() in _DATA_SUFFIXES)
        return ConfigError(
            f"{str(path)!r} is not a config: expected a file that ends in .py or, as saved, .json. Nothing in it was "
            f"run.{remedy}"
        )
    if path.suffix not in CONFIG_SUFFIXES:
        if listed := model_zoo.listed_name(str(path)):
            config = model_zoo.index()[listed]["config"]
            return ConfigError(
                f"no config file {str(path)!r}: that is a trained model of the zoo. Its config is {config!r}; "
                f"`vitkit train {config} --init {path}` starts from its weights."
            )
        family, colon, _ = str(path).partition(":")
        if colon and find_config(family) is not None:
            return ConfigError(f"{path}: expected {family}:NAME=VALUE,NAME=VALUE for the arguments of its config().")
        message = f"no config file {str(path)!r}, nor an installed config of that name"
        return ConfigError(unknown(str(path), config_names(), message))
    names = [p.name for p in path.parent.glob(f"*{path.suffix}") if p.name != "__init__.py"]
    installed = (Path("configs", f"{name}.py") for name in config_names())
    names += [p.name for p in installed if p.parent == path.parent and p.name not in names]
    known = nearest(path.name, names) if names else "That folder has no config."
    return ConfigError(f"no config file {str(path)!r}. {known}")


def _read(source: ConfigSource) -> dict[str, Any]:
    path = source.file
    if path.suffix == ".json":
        return _parse(path.read_bytes(), path)
    with importable(path.parent, lambda file, source: None):
        function = vars(_run(path)).get("config")
        if not callable(function):
            raise ConfigError(f"{path}: has no function config(); a config file defines one that returns a dict.")
        _check_arguments(function, source.arguments, path)
        with _naming_line(path):
            cfg = function(**source.arguments)
    if not isinstance(cfg, dict):
        raise ConfigError(f"{path}: got {type(cfg).__name__} from config(); expected a dict.")
    return cfg


def _check_arguments(function: Callable, arguments: Mapping[str, Any], path: Path) -> None:
    """Raise a ConfigError for an argument that a config's function does not take, or a value that does not fit."""
    slots = slots_of(function) if arguments else {}
    for name, value in arguments.items():
        if name not in slots:
            known = nearest(name, slots) if slots else "It takes none."
            raise ConfigError(f"{path}: config() has no argument {name!r}. {known}")
        if not slots[name].accepts(value):
            choices = [str(choice) for choice in slots[name].choices]
            expected = nearest(str(value), choices) if choices else f"Expected {slots[name].expected}."
            raise ConfigError(f"{path}: {name}: got {value!r}. {expected}")


def _parse(text: str | bytes, path: str | Path) -> dict[str, Any]:
    """Parse the config in JSON text."""
    try:
        cfg = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a saved config: {error}.") from error
    if not isinstance(cfg, dict):
        raise ConfigError(f"{path}: got {type(cfg).__name__} as saved config; expected a dict.")
    if cfg.keys() >= {"images", "annotations"}:
        raise ConfigError(f"{path}: has a dataset's annotations, not a config. Use `vitkit start IMAGES {path}`.")
    return cfg


@contextmanager
def _naming_line(path: Path) -> Iterator[None]:
    """Convert any exception from a user's file to a ConfigError that names the file's line."""
    try:
        yield
    except Exception as error:  # whatever a user's file raises
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else "?"
        if isinstance(error, ConfigError):  # a config's own check of its arguments
            raise ConfigError(f"{path}, line {line}: {error}") from error
        if isinstance(error, SyntaxError) and error.lineno is not None:
            path, line = error.filename or path, error.lineno  # of the file, or of one that it imports
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error


def _run(path: Path, source: bytes | None = None) -> types.ModuleType:
    """Run a Python file as a separate module, by its content `source` if it was already read."""
    name = f"vitkit_user_{path.stem}_{hashlib.sha1(str(path.resolve()).encode()).hexdigest()[:12]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    with _naming_line(path):
        exec(compile(path.read_bytes() if source is None else source, str(path), "exec"), module.__dict__)
    return module


def _read_imported_code(cfg: dict[str, Any], folder: Path, *, is_saved: bool) -> list[ImportedCode]:
    """Return the code listed in `imports`, with the content of its files, without running anything.

    Relative paths start at `folder`. If `is_saved`, the paths are those of another machine: a file that is not here may
    lie in `folder`. If there is no such file, a ConfigError is raised.
    """
    if not TOP_LEVEL["imports"].accepts(cfg.get("imports", [])):
        return []  # `check_config` reports it
    code = []
    for i, name in enumerate(cfg.get("imports", [])):
        key = f"imports.{i}"
        if not name.endswith(".py"):
            code.append(ImportedCode.of_module(key, name))
            continue
        if is_saved and not isfile(folder / name):
            file = re.split(r"[/\\]", name)[-1]
            if not isfile(folder / file):
                raise ConfigError(
                    f"{key}: the model's own code, '{name}', is not on this machine. Ask its author for {file} and the "
                    f"files that it imports, put them into '{folder}' and read them; then add --trust. Or ask for an "
                    "ONNX file (`vitkit export`), which needs no code."
                )
            name = file
        if not isfile(folder / name):
            raise ConfigError(f"{key}: no file {str(folder / name)!r}; relative paths start at {str(folder)!r}.")
        path = (folder / name).resolve()
        code.append(ImportedCode(key, str(path), str(path), path.read_bytes()))
    return code


def _import_code(code: Sequence[ImportedCode], own: list[ImportedCode], *, path: Path, trust: bool) -> None:
    """Run the files as they were read, and import the modules; what these import beside them is trusted or refused.

    Args:
        own: the code that the user named.
        path: the config, for errors.
        trust: whether files beside untrusted code may run.
    """

    def admit(importer: ImportedCode, file: Path, source: bytes) -> None:
        neighbor = ImportedCode(f"imported by {importer.name}", str(file), str(file), source)
        is_own = importer in own
        if not is_own and not trust:
            require_trust([neighbor], path)
        remember([neighbor], own=[neighbor] if is_own else [])

    for item in code:
        if item.name.endswith(".py"):
            with importable(Path(item.name).parent, partial(admit, item)):
                _run(Path(item.name), item.source)
            continue
        folder = None if item.name in sys.modules else folder_of(item.name)
        try:
            with nullcontext() if folder is None else importable(folder, partial(admit, item), keep=True):
                importlib.import_module(item.name)
        except ConfigError:
            raise
        except Exception as error:  # whatever a user's module raises, not only that it is missing
            raise ConfigError(
                f"{item.key}: importing {item.name!r} failed: {type(error).__name__}: {error}. "
                "Name an installed module, or a file that ends in .py. For somebody else's model, ask its author "
                "for it, or for an ONNX file (`vitkit export`), which needs no code."
            ) from error


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of everything that is not a dict; lists are only opened if they contain dicts."""
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
