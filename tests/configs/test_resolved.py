"""The resolved config of every name is the one that is stored in resolved.json, so that a change is always on purpose.

After a change on purpose: python tests/configs/test_resolved.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import vitkit.configs
from vitkit import model_zoo
from vitkit.apps.inference import find_model
from vitkit.config import Config, cfg_diff, config_names, value_at

FILE = Path(__file__).with_name("resolved.json")
FOLDER = Path(vitkit.configs.__path__[0])


def resolved(name: str) -> dict[str, Any]:
    """Return the config of an installed name or of a model of the zoo as JSON, without the folder of the checkout."""
    config: Config = find_model(name).config
    return json.loads(json.dumps(config).replace(f"{FOLDER}/", ""))


def pack(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Store each section once: its content under the name that first has it, and that name for the others."""
    seen, packed = {}, {}
    for name, config in configs.items():
        packed[name] = {}
        for key, section in config.items():
            first = seen.setdefault(key + json.dumps(section, sort_keys=True), name)
            packed[name][key] = section if first == name else f"as {first}"
    return packed


def unpack(packed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configs that `pack` stored."""
    return {
        name: {
            key: packed[section.removeprefix("as ")][key] if isinstance(section, str) else section
            for key, section in config.items()
        }
        for name, config in packed.items()
    }


def names() -> list[str]:
    """Return the names of all installed configs and of all models of the zoo."""
    return sorted({*config_names(), *model_zoo.index()})


STORED = unpack(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.exists() else {}


def test_every_name_is_stored():
    assert names() == list(STORED)


@pytest.mark.parametrize("name", STORED)
def test_resolved_config_is_as_stored(name):
    new, old = resolved(name), STORED[name]
    changes = [f"{key}: {value_at(old, key, '-')!r} -> {value_at(new, key, '-')!r}" for key in cfg_diff(old, new)]
    assert not changes, "\n".join([f"{name} has changed:", *changes, "It is now:", json.dumps(new, indent=1)])
    assert new == old


@pytest.mark.parametrize("name", [name for name in STORED if "iou_types" in STORED[name].get("evaluator", {})])
def test_best_metric_is_of_what_is_evaluated(name):
    config = STORED[name]
    metric = config.get("train", {}).get("best_metric", "bbox/AP")
    assert metric.partition("/")[0] in config["evaluator"]["iou_types"]


if __name__ == "__main__":
    packed = pack({name: resolved(name) for name in names()})
    lines = (f"{json.dumps(name)}: {json.dumps(config)}" for name, config in packed.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
