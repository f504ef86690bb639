"""The published figures of the backbones."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from vitkit import model_zoo


@cache
def read_published() -> dict[str, dict[str, Any]]:
    """Return backbone variant -> its published figures, those counted on the original code, and their input."""
    path = Path(model_zoo.__file__).parent / "backbones.json"
    return json.loads(path.read_text(encoding="utf-8"))


def zoo_entry(name: str) -> dict[str, Any]:
    """Return the entry of the model zoo with a backbone's published weights; {} without one."""
    return model_zoo.index().get(read_published().get(name, {}).get("weights"), {})
