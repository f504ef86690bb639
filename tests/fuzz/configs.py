"""Saved configs and overrides on the command line."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from fuzz.formats import Format, naming
from fuzz.mutate import mutate_json, places

from vitkit import build_model, load_config
from vitkit.configs.quickstart.detr import config as detr
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.settings import TrainSettings, require
from vitkit.errors import ConfigError, VitkitError
from vitkit.registry import CRITERIA, EVALUATORS, OPTIMIZERS, SCHEDULES, TRANSFORMS

JUNK: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 255, 0.0, 0.5, -2.5, 1e308, float("nan"), "", "x", "none"]
JUNK += ["res5", "resnet18", [], {}, [None], [1, 2], {"type": "x"}, {"type": None}, "DETR", [[]], {"a": 1}, "timm/x"]
JUNK += [{"type": "ComposedTransforms", "transforms": [{"type": "Mosaic"}]}, ["evil.py"], "HungarianMatcher"]
_TEXTS = ["[1,2", "{", "'", "1e999", "__import__('os')", "lambda: 1", "(" * 300, "[" * 5000, "9" * 5000, "1_0", "\0"]


@functools.cache
def _sound() -> str:
    cfg = detr()
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=1)
    cfg["model"]["neck"]["out_channels"] = 32
    return json.dumps(cfg)


def build_parts(config: Any) -> None:
    """Build the model and the settings, as a run does; the model takes no memory."""
    require(config, "model", "criterion", "data", "train.epochs")
    TrainSettings(**config["train"])
    data = DataSettings(**config["data"])
    with torch.device("meta"):
        model = build_model(config["model"], classes=["cat", "dog"])
    CRITERIA.build(config["criterion"])
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    for split in (data.train, data.val):
        if isinstance(split, dict) and split.get("transforms") is not None:
            TRANSFORMS.build(split["transforms"])
    for part, registry in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("evaluator", EVALUATORS)):
        if part in config:
            registry.resolve(config[part], part)


def _write_config(rng: random.Random, folder: Path, world: Path) -> None:
    (folder / "fuzzed.json").write_bytes(mutate_json(json.loads(_sound()), rng, JUNK))


def check_config(folder: Path, world: Path) -> None:
    """Check that an accepted config can be built, and is the same after it is saved."""
    with naming("fuzzed.json"):
        config = load_config(folder / "fuzzed.json")
    json.dumps(config)
    build_parts(config)


def _write_overrides(rng: random.Random, folder: Path, world: Path) -> None:
    content = json.loads(_sound())
    keys = [".".join(map(str, place)) for place in places(content) if place]
    overrides = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        key = rng.choice(keys)
        if rng.random() < 0.25:
            letters = list(key)
            letters[rng.randrange(len(letters))] = rng.choice("abcxyz.=_0 é[]\n")
            key = "".join(letters)
        value = rng.choice([*map(str, JUNK), *_TEXTS])
        overrides.append(rng.choice([f"{key}={value}"] * 8 + [key, value, f"={value}", f"{key}.{key}={value}"]))
    (folder / "overrides.json").write_text(json.dumps(overrides))


def check_overrides(folder: Path, world: Path) -> None:
    """Check that accepted overrides give a config that can be built."""
    (folder / "sound.json").write_text(_sound())
    build_parts(load_config(folder / "sound.json", json.loads((folder / "overrides.json").read_text())))


def _warm_up(world: Path, folder: Path) -> None:
    (folder / "overrides.json").write_text("[]")
    check_overrides(folder, world)


FORMATS = [
    Format("configs", _write_config, check_config, VitkitError, 4, _warm_up),
    Format("overrides", _write_overrides, check_overrides, ConfigError, 6, _warm_up),
]
