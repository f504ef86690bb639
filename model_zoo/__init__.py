"""Published models: the index of their weights, and converters from official checkpoints."""

import json
from pathlib import Path
from typing import Any

from vitkit.checkpoint.download import cached_file


def index() -> dict[str, dict[str, Any]]:
    """Return the index: model name -> config, address and checksum of the weights, published figures."""
    return json.loads((Path(__file__).parent / "index.json").read_text(encoding="utf-8"))


def published_weights(name: str) -> Path:
    """Return the file with a listed model's weights, downloaded unless it is in the cache.

    Raises:
        CheckpointError: the address cannot be reached, or the file is damaged.
    """
    entry = index()[name]
    return cached_file(entry["url"], sha256_prefix=entry["sha256_prefix"])
