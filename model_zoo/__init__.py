"""Published models: the index of their weights, and converters from and to other projects' key names."""

import json
from pathlib import Path
from typing import Any

from vitkit.checkpoint.download import cached_file

_FOLDER = Path(__file__).parent


def index() -> dict[str, dict[str, Any]]:
    """Return the index: model name -> config, URL and checksum of the weights, published figures, licence."""
    return json.loads((_FOLDER / "index.json").read_text(encoding="utf-8"))


def unpublished() -> dict[str, str]:
    """Return the configs without an entry in the index: name -> why there is no published file."""
    return json.loads((_FOLDER / "unpublished.json").read_text(encoding="utf-8"))


def published_name(path: str | Path) -> str | None:
    """Return the model in the index whose file has this name, if the name contains the file's checksum."""
    name = Path(path).name
    for model, entry in index().items():
        checksum = entry["checksum"].removeprefix("sha256:")[:8]
        if checksum and checksum in name and entry["url"].endswith(f"/{name}"):
            return model
    return None


def published_weights(name: str) -> Path:
    """Return the file with the weights of a model in the index, downloaded unless it is in the cache.

    Raises:
        CheckpointError: the address cannot be reached, or the file is damaged.
    """
    entry = index()[name]
    return cached_file(entry["url"], checksum=entry["checksum"], name=entry.get("file"))
