"""Runs from a config to its metrics: everything that a config names is built here and passed to `engine`."""

from vitkit.runs.api import Run, test, train
from vitkit.runs.testing import Evaluated

__all__ = ["Evaluated", "Run", "test", "train"]
