"""Published models by their names in the model zoo's index: their files and their configs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitkit import model_zoo
from vitkit.config.load import Config, load_config
from vitkit.errors import CheckpointError
from vitkit.weights.download import fetch_file, file_digest


def fetch_published(name: str) -> Path:
    """Return the file with the weights of a model in the index, downloaded unless it is in the package or the cache.

    Raises:
        CheckpointError: the URL cannot be reached, or the file is damaged.
    """
    entry = model_zoo.index()[name]
    if model_zoo.is_packaged(name):
        return _packaged_file(entry)
    return fetch_file(entry["url"], checksum=entry["checksum"], name=entry.get("file"))


def load_published_config(name: str, overrides: Sequence[str] = (), *, check: bool = True) -> Config:
    """Return the config of a model in the index; other arguments are those of `load_config`."""
    entry = model_zoo.index()[name]
    differences = entry.get("overrides", ())  # of an official model that shares the config of another one
    return load_config(entry["config"], [*differences, *overrides], check=check)


def _packaged_file(entry: dict[str, Any]) -> Path:
    path = model_zoo.FOLDER / entry["url"]
    remedy = "Install vitkit again (pip install --force-reinstall), or get the file from its sources."
    if not path.is_file():
        raise CheckpointError(f"{path}: is missing, although it is part of vitkit. {remedy}")
    algorithm, _, expected = entry["checksum"].partition(":")
    digest = file_digest(path, algorithm)
    if not digest.startswith(expected):
        raise CheckpointError(f"{path}: {algorithm} begins {digest[: len(expected)]}, expected {expected}. {remedy}")
    return path
