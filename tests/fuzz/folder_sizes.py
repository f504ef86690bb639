"""Sizes and numbers in the settings of folders of the transformers library, which claim more than the weights hold."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.formats import Format
from fuzz.hostile import NAMES
from fuzz.mutate import mutate_json, places

import vitkit
from vitkit import build_model
from vitkit.apps.conversion.transformers_writing import write_folder
from vitkit.apps.inference import Predictor
from vitkit.errors import VitkitError

_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    17,
    10**4,
    10**6,
    2**31 - 1,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    "3",
    None,
    [],
    True,
)
_BACKBONE = dict(type="ViT", d_model=16, depth=1, num_heads=2, patch_size=16, image_size=32, pretrained=False)
_CLASSIFIER = dict(type="Classifier", backbone=_BACKBONE)
_LAYERS = dict(num_encoder_layers=1, num_decoder_layers=1, d_model=32, num_heads=2, d_ffn=32)
_DETECTOR = dict(
    type="DETR",
    num_queries=5,
    backbone=dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False),
    neck=dict(type="ChannelProjection", out_channels=32),
    head=dict(type="DETRHead", dropout=0.1, **_LAYERS),
)
_D_FINE = dict(
    type="DFINE",
    num_queries=4,
    num_detections=4,
    backbone=dict(
        type="TimmBackbone",
        name="hgnetv2_b0",
        out_features=["res4", "res5"],
        pixel_mean=[0.0] * 3,
        pixel_std=[1.0] * 3,
        pretrained=False,
    ),
    neck=dict(type="DFINEEncoder", out_channels=32, num_blocks=1, num_heads=2, d_ffn=32),
    head=dict(type="DFINEHead", d_model=32, num_heads=2, d_ffn=32, num_points=[2, 2], num_decoder_layers=1),
)
_RF_DETR = dict(
    type="RFDETR",
    num_queries=5,
    num_detections=5,
    backbone=dict(
        type="WindowedViT",
        image_size=32,
        patch_size=8,
        d_model=16,
        depth=2,
        num_heads=2,
        num_windows=2,
        out_features=["block1", "block2"],
        global_blocks=[1],
        pretrained=False,
    ),
    neck=dict(type="C2fProjection", in_features=["block1", "block2"], out_channels=32, num_blocks=1),
    head=dict(
        type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=2, num_points=2, d_ffn=32, num_decoder_layers=1
    ),
)
_SPECS: dict[str, dict[str, Any]] = {"vit": _CLASSIFIER, "detr": _DETECTOR, "d_fine": _D_FINE, "rf_detr": _RF_DETR}


@cache
def sound(kind: str) -> dict[str, bytes]:
    """Return the files of a small model's folder by their names."""
    torch.manual_seed(0)
    spec = _SPECS[kind]
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), Predictor(build_model(spec, classes=["cat", "dog"]), ["cat", "dog"]), spec)
        vitkit.load(name)  # imports everything, once
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    files = dict(sound(rng.choice(["vit", *_SPECS])))
    name = rng.choice(["config.json"] * 5 + [name for name in files if name.endswith(".json")])
    content = json.loads(files[name])
    if rng.random() < 0.25:
        files[name] = mutate_json(content, rng)
    else:
        for _ in range(rng.choice([1, 1, 2, 4])):
            *path, key = rng.choice([place for place in places(content) if place])
            owner = content
            for step in path:
                owner = owner[step]
            numbers = isinstance(owner[key], int | float | list)
            owner[key] = rng.choice(_NUMBERS if numbers else [*NAMES, *_NUMBERS])
            content = json.loads(json.dumps(content))
        files[name] = json.dumps(content).encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def check(folder: Path, world: Path) -> None:
    """Check that an accepted model predicts."""
    predictor = vitkit.load(str(folder))
    prediction = predictor(np.full((32, 32, 3), 128, np.uint8)).to_json()
    assert prediction["width"] == prediction["height"] == 32


def _warm_up() -> None:
    for kind in _SPECS:
        sound(kind)


FORMATS = [Format("folders", _write, check, VitkitError, 4, _warm_up)]
