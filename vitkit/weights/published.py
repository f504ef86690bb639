"""The model zoo, which knows the names and files of published weights and the key names of official ones.

It stands above this package, so it is imported by its name, when it is first asked.
"""

import importlib
from types import ModuleType


def model_zoo() -> ModuleType:
    """Return `vitkit.model_zoo`: its index of names, files and configs."""
    return importlib.import_module("vitkit.model_zoo")


def converters() -> ModuleType:
    """Return `vitkit.model_zoo.converters`: official key names."""
    return importlib.import_module("vitkit.model_zoo.converters")
