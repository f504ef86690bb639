"""Published models: the index of their weights, and converters from and to other projects' key names."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
"""The folder of the index, and of the weights that are part of the package."""


def index() -> dict[str, dict[str, Any]]:
    """Return the index: model name -> config, URL and checksum of the weights, figures, license.

    A URL without "https:" is a file in the package, beside the index.
    """
    return json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))


def listed_name(name: str) -> str | None:
    """Return the name in the index of a model that may also be named with or without "_coco" at the end, if its config
    is; None if it is not there."""
    return name if name in index() else _other_names().get(name)


def _other_names() -> dict[str, str]:
    """Return the names with or without "_coco" at the end that are not in the index -> those in the index."""
    others = {}
    for name, entry in index().items():
        if name.endswith("_coco"):
            others[name.removesuffix("_coco")] = name
        elif entry["config"] == f"{name}_coco":
            others[f"{name}_coco"] = name
    return others


def unpublished() -> dict[str, str]:
    """Return the configs without an entry in the index: name -> why there is no published file."""
    return json.loads((FOLDER / "unpublished.json").read_text(encoding="utf-8"))


def trained() -> dict[str, dict[str, Any]]:
    """Return the figures of weights that are not published: name of the config that trains them -> figures, data, time.

    `vitkit reproduce NAME --train` trains them anew.
    """
    return json.loads((FOLDER / "trained.json").read_text(encoding="utf-8"))


def find_by_file(path: str | Path) -> str | None:
    """Return the name in the index of the model whose published file has a path's name, if that name contains the
    file's checksum; None for other files."""
    name = Path(path).name
    for model, entry in index().items():
        checksum = entry["checksum"].removeprefix("sha256:")[:8]
        if checksum and checksum in name and entry["url"].endswith(f"/{name}"):
            return model
    return None


def is_packaged(name: str) -> bool:
    """Whether the weights of a model in the index are part of the package."""
    return "://" not in index()[name]["url"]
