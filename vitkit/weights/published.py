"""The model zoo, which knows the names and files of published weights and the key names of official ones.

It stands above this package, so it is imported by its name, when it is first asked.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType

from vitkit.config import Config, load_config


def model_zoo() -> ModuleType:
    """Return `vitkit.model_zoo`: its index of names, files and configs."""
    return importlib.import_module("vitkit.model_zoo")


def converters() -> ModuleType:
    """Return `vitkit.model_zoo.converters`: official key names."""
    return importlib.import_module("vitkit.model_zoo.converters")


def load_published_config(name: str, overrides: Sequence[str] = (), *, check: bool = True) -> Config:
    """Return the config of a model in the index; other arguments are those of `load_config`."""
    entry = model_zoo().index()[name]
    own = entry.get("overrides", ())  # an official model that shares the config of another one
    return load_config(entry["config"], [*own, *overrides], check=check)
