"""Makes the data paths of configs absolute."""

import os
import typing
from pathlib import Path
from typing import Any

from vitkit.config.check import reads_root
from vitkit.config.schema import TOP_LEVEL, Slot, slots_in
from vitkit.registry import DATASETS, Spec
from vitkit.text_format import is_url

_ROOT = "{root}"


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def make_data_paths_absolute(cfg: dict[str, Any]) -> None:
    """Make the paths of a checked config's data absolute, in place; a saved config is then valid in any folder.

    These are `data.root`, and the arguments of `data.train`, `data.val` and `data.test` that their datasets annotate
    with `Path`.
    """
    data = cfg["data"]
    if "root" in data or reads_root(cfg):
        default = slots_in(TOP_LEVEL["data"], data, "data")["root"].default
        data["root"] = _absolute(data.get("root", default))
    for split in ("train", "val", "test"):
        spec = data.get(split)
        if not isinstance(spec, dict):
            continue
        for name, slot in slots_in(Slot(Spec, registry=DATASETS), spec, f"data.{split}").items():
            value = spec.get(name)
            if Path in typing.get_args(slot.annotation) and isinstance(value, str) and not value.startswith(_ROOT):
                spec[name] = _absolute(value)
