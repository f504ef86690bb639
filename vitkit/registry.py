"""Maps names to constructors, which defines the `type` strings of configs.

A class registers under its own name, so `git grep "class DETR("` finds what a config names. A family may add
variants, which are names for a class with some arguments set: `BACKBONES.build("resnet50")`.
"""

import difflib
import importlib
import inspect
import itertools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

from vitkit.errors import ConfigError, VitkitError

Spec = str | Mapping[str, Any]
"""The specification of an object: a registered name, or a dict with `type` and constructor arguments."""

Constructor = Callable[..., Any]
"""A class, or a function that returns an object."""

MAX_NAMES = 40
"""The maximum number of names that an error message lists."""


@runtime_checkable
class ChecksArguments(Protocol):
    """A registered class that can check a config's arguments before it is built."""

    check_arguments: Callable[..., None]
    """Takes those of the config's arguments that it names as parameters; raises ConfigError."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message: the names nearest to a mistaken one, then all, unless there are many."""
    names = sorted(names)
    close = [other for other in names if other.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
    if close and len(names) > MAX_NAMES:
        return f"{hint}There are {len(names)} names."
    more = f", and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{hint}Known: {', '.join(names[:MAX_NAMES]) if names else '(none)'}{more}."


def nearest_file(path: PurePath) -> str:
    """Return the end of an error message about a missing file: the nearest name in its folder; "" if none is near."""
    try:
        close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except (FileNotFoundError, NotADirectoryError):
        return f" There is no folder '{path.parent}'."
    except (OSError, ValueError):  # it may not be read, or its name has a zero byte
        return ""
    return f" In '{path.parent}' there is '{close[0]}'." if close else ""


def unknown(name: str, names: Collection[str], message: str) -> str:
    """Return an error message for a text that is neither a file nor one of the names.

    Args:
        name: may have "configs/" before one of the names.
        message: what it is not, which is left out for a path: a name with an ending, or in a folder that has none of
            the names.
    """
    path, installed = PurePath(name), PurePath(name.removeprefix("configs/"))
    if path.suffix or installed.parent not in {PurePath(known).parent for known in names}:
        return f"no file or folder {name!r}.{nearest_file(path)}"
    return f"{message}.{nearest_file(path) if len(path.parts) == 1 else ''} {nearest(installed.as_posix(), names)}"


def parameters_of(constructor: Constructor) -> dict[str, inspect.Parameter]:
    """Return a constructor's named arguments, in order; a class's `**kwargs` stand for those of its base class."""
    parameters: dict[str, inspect.Parameter] = {}
    for accepting in constructors_in(constructor):
        for p in _list_named(accepting):
            parameters.setdefault(p.name, p)
    return parameters


def _list_named(constructor: Constructor) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p for p in inspect.signature(constructor).parameters.values() if p.kind in kinds]


def constructors_in(constructor: Constructor) -> list[Constructor]:
    """Return a constructor and, if it is a class whose `__init__` takes `**kwargs`, the base classes that get them."""
    constructors = [constructor]
    if isinstance(constructor, type):
        with_init = [cls for cls in constructor.__mro__[:-1] if "__init__" in vars(cls)]
        for cls, base in itertools.pairwise(with_init):
            if not takes_keywords(cls):
                break
            constructors.append(base)
    return constructors


def takes_keywords(constructor: Constructor) -> bool:
    """Whether a callable takes keyword arguments of any name."""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values())


class Registry:
    """Constructors of one kind by name.

    Args:
        kind: what is registered, as error messages and config keys call it ("backbone").
        packages: vitkit's packages whose files register constructors of this kind; they are all imported at the first
            look-up.
        in_errors: whether errors of a constructor are preceded by `kind`, the key of its spec in its owner's.
        base: dotted name of the class that classes of this kind derive from; None if they need no base.
    """

    def __init__(self, kind: str, *packages: str, in_errors: bool = False, base: str | None = None):
        self.kind = kind
        self.in_errors = in_errors
        self._packages = packages
        self._base = base
        self._constructors: dict[str, Constructor] = {}
        self._variants: dict[str, tuple[Constructor, dict[str, Any]]] = {}
        self._prefixes: dict[str, tuple[Constructor, str]] = {}

    def register(self, target: Constructor | None = None, *, name: str | None = None) -> Constructor:
        """Register a constructor, as a decorator: `@BACKBONES.register` or `@BACKBONES.register(name="other_name")`.

        Raises:
            ConfigError: the name is taken by another constructor, or a class does not derive from the kind's base.
        """
        if target is None:
            return lambda decorated: self.register(decorated, name=name)
        if isinstance(target, type):
            self._check_base(target)
        self._claim(name or target.__name__, target)
        self._constructors[name or target.__name__] = target
        return target

    def register_variants(self, constructor: Constructor, table: Mapping[str, Mapping[str, Any]]) -> None:
        """Register each row of `table` (variant name -> constructor arguments) as a name."""
        for name, arguments in table.items():
            self._claim(name, constructor)
            self._variants[name] = (constructor, dict(arguments))

    def register_prefix(self, prefix: str, constructor: Constructor, *, argument: str) -> None:
        """Let every name that begins with `prefix` stand for `constructor`, with the rest of the name as `argument`.

        A constructor that takes only certain names rejects the others in `check_arguments`, with which configs are
        checked.
        """
        self._prefixes[prefix] = (constructor, argument)

    def _claim(self, name: str, constructor: Constructor) -> None:
        taken = self._constructors.get(name) or self._variants.get(name, (None,))[0]
        # A user's file that is imported twice, also as a file and as a module, registers the same class again, which is
        # not a conflict.
        if taken is not None and _source(taken) != _source(constructor):
            raise ConfigError(f"{self.kind} {name!r} is already registered by {taken.__module__}: choose another name.")

    def _check_base(self, cls: type) -> None:
        if self._base is not None:
            # Imported by name, like the packages: vitkit.protocols is on the same level as registries.
            module, _, base = self._base.rpartition(".")
            require_base(self.kind, cls, getattr(importlib.import_module(module), base))

    def load_packages(self) -> None:
        """Import vitkit's packages with all their files, which register their constructors."""
        packages, self._packages = self._packages, ()
        for package in packages:
            module = importlib.import_module(package)
            for file in pkgutil.iter_modules(vars(module).get("__path__", ())):
                importlib.import_module(f"{package}.{file.name}")

    def names(self) -> list[str]:
        """Return all registered names, sorted, including variants but not names with a registered prefix."""
        self.load_packages()
        return sorted({*self._constructors, *self._variants})

    def __contains__(self, name: str) -> bool:
        self.load_packages()
        return name in self._constructors or name in self._variants or name.startswith(tuple(self._prefixes))

    def resolve(self, spec: Spec, key: str | None = None) -> tuple[Constructor, dict[str, Any]]:
        """Return the constructor that a spec names, and its arguments (a variant's, overridden by the spec's).

        Args:
            key: the config key of the spec, named in errors.
        Raises:
            ConfigError: the spec has no `type`, or the type is unknown.
        """
        self.load_packages()
        key = key or self.kind
        arguments = {"type": spec} if isinstance(spec, str) else dict(spec)
        name = arguments.pop("type", None)
        if not isinstance(name, str):
            raise ConfigError(
                f"{key}: got {spec!r} without a 'type'; expected a {self.kind}'s name or a dict(type=...). "
                f"{nearest('', self.names())}"
            )
        if name in self._variants:
            constructor, preset = self._variants[name]
            return constructor, {**preset, **arguments}
        if name in self._constructors:
            return self._constructors[name], arguments
        for prefix, (constructor, argument) in self._prefixes.items():
            if name.startswith(prefix):
                return constructor, {argument: name.removeprefix(prefix), **arguments}
        raise ConfigError(f"{key}: unknown {self.kind} {name!r:.300}. {nearest(name, self.names())}")

    def build(self, spec: Any, /, **arguments: Any) -> Any:
        """Build the object that `spec` specifies; an object that is already built is returned as is.

        Args:
            spec: a name, or a dict with `type`.
            arguments: more constructor arguments (those that a config leaves open, such as a head's `num_classes`).
        Raises:
            ConfigError: the name or an argument is unknown, given twice, or missing; or the object is of a wrong class.
        """
        if not isinstance(spec, str | Mapping):
            self._check_base(type(spec))
            return spec
        constructor, configured = self.resolve(spec)
        # `arguments` may override what a variant presets, but not what the config sets.
        twice = arguments.keys() & (spec.keys() if isinstance(spec, Mapping) else {"type"})
        if twice:
            raise ConfigError(
                f"{self.kind} {constructor.__name__}: {', '.join(sorted(twice))} is set by its owner, such as the "
                "model, and cannot be set here as well. Leave it out."
            )
        arguments = configured | arguments
        check_names(constructor, arguments, f"{self.kind} {constructor.__name__}")
        # What a base class requires is not looked at, since the class may set it.
        missing = [p.name for p in _list_named(constructor) if p.default is p.empty and p.name not in arguments]
        if missing:
            raise ConfigError(f"{self.kind} {constructor.__name__}: missing argument {', '.join(missing)}.")
        try:
            return constructor(**arguments)
        except ConfigError as error:
            if self.in_errors:  # a layer knows its own arguments, and the builds around it their path in the config
                error.add_key(self.kind)
            raise
        except VitkitError:
            raise
        except (ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]  # torch's messages go on with a trace of its own
            raise ConfigError(f"{self.kind} {constructor.__name__}: {reason}") from error
        except (AttributeError, LookupError, NameError) as error:
            if constructor.__module__.startswith("vitkit."):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}, line {frame.lineno})"
            raise ConfigError(f"{self.kind} {constructor.__name__}: its constructor failed: {reason}.") from error


def require_base(kind: str, cls: type, base: type) -> None:
    """Check that a user's class derives from the base of its kind.

    Args:
        kind: what the class is, for the error ("dataset").
    Raises:
        ConfigError: it does not.
    """
    if not issubclass(cls, base):
        raise ConfigError(
            f"{kind} {cls.__name__} does not derive from vitkit.{base.__name__}, which has the defaults of what it may "
            f"leave out. Write: class {cls.__name__}(vitkit.{base.__name__})."
        )


def _source(constructor: Constructor) -> tuple[str, str]:
    """Return the file (or the module, without one) that defines a constructor, and its name there."""
    module = sys.modules.get(constructor.__module__)
    return getattr(module, "__file__", None) or constructor.__module__, constructor.__qualname__


def check_names(constructor: Constructor, arguments: Iterable[str], owner: str) -> None:
    """Check that a constructor takes arguments with these names.

    Raises:
        ConfigError: the constructor has no argument of one of these names; the message suggests the nearest.
    """
    parameters = parameters_of(constructor)
    for name in arguments:
        if name not in parameters:
            raise ConfigError(f"{owner}: unknown argument {name!r}. {nearest(name, parameters)}")


BACKBONES = Registry("backbone", "vitkit.backbones", in_errors=True)
NECKS = Registry("neck", "vitkit.necks", in_errors=True)
HEADS = Registry("head", "vitkit.heads", in_errors=True)
MASK_HEADS = Registry("masks", "vitkit.nn.query_masks", in_errors=True)
TRAINING_QUERIES = Registry("training_queries", "vitkit.training_queries", in_errors=True)
TEXT_ENCODERS = Registry("text_encoder", "vitkit.nn.text_encoders", in_errors=True)
MODELS = Registry("model", "vitkit.models", "vitkit.seq2seq", in_errors=True, base="vitkit.protocols.model.Model")
MATCHERS = Registry("matcher", "vitkit.matchers", in_errors=True, base="vitkit.matchers.base.Matcher")
CRITERIA = Registry(
    "criterion", "vitkit.losses", "vitkit.models", in_errors=True, base="vitkit.protocols.criterion.Criterion"
)
DATASETS = Registry(
    "dataset",
    "vitkit.data.datasets",
    "vitkit.data.synthetic",
    "vitkit.data.text",
    base="vitkit.protocols.dataset.Dataset",
)
TRANSFORMS = Registry("transforms", "vitkit.data.transforms")
ALBUMENTATIONS = Registry("albumentation", "vitkit.data.transforms")
"""Albumentations that `ComposedTransforms` knows besides the library's; each is a subclass of one of its bases."""
OPTIMIZERS = Registry("optimizer", "vitkit.engine.optimizers", in_errors=True)
SCHEDULES = Registry("schedule", "vitkit.engine.schedules", in_errors=True)
EVALUATORS = Registry("evaluator", "vitkit.evaluation", base="vitkit.protocols.evaluator.Evaluator")
HOOKS = Registry("hook", "vitkit.engine.hooks", "vitkit.models")
SECTIONS = Registry("section", "vitkit.data.loading.settings", "vitkit.engine.settings")
"""Config sections without a `type`: `data` and `train`, each a dataclass of settings."""

REGISTRIES = {
    r.kind: r
    for r in (
        BACKBONES,
        NECKS,
        HEADS,
        TRAINING_QUERIES,
        TEXT_ENCODERS,
        MODELS,
        MATCHERS,
        CRITERIA,
        DATASETS,
        TRANSFORMS,
        OPTIMIZERS,
        SCHEDULES,
        EVALUATORS,
        HOOKS,
        SECTIONS,
    )
}
"""Kind -> registry. A config key with the name of a kind holds a spec of it (`model.backbone`, `criterion.matcher`)."""
