"""`vitkit start` on the drawn world of tests/apps/starter/conftest.py."""

from pathlib import Path
from typing import Any

from vitkit import load_config
from vitkit.tools.start import main

RANDOM = "model.backbone.pretrained=false"


def start_detection(world: Path, *args: str) -> dict[str, Any]:
    """Return the config that `vitkit start` writes for boxes, without training it."""
    main([str(world / "train2017"), str(world / "annotations/instances_train2017.json"), RANDOM, "--dry-run", *args])
    return load_config(Path("runs/start/config.py"))
