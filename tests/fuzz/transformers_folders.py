"""Folders of the transformers library: settings, weights in one file or in several with an index.

The settings are also those of folders that vitkit wrote, with numbers that claim more than the weights hold.
"""

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.archives import join_safetensors, split_safetensors, with_entry
from fuzz.formats import Format
from fuzz.hostile import NAMES
from fuzz.mutate import mutate_bytes, mutate_json, places
from fuzz.world import CLASSIFIER, GRAY, small_predictor

import vitkit
from vitkit.apps.conversion.transformers_writing import write_folder
from vitkit.errors import VitkitError

try:
    import transformers
    from safetensors.torch import load, save
except ImportError:
    transformers = None

_SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32)
_TENSOR_FIELDS: dict[str, list[Any]] = {
    "dtype": ["F16", "I64", "BOOL", "F99", 3],
    "shape": [(), (0,), (-1,), (3,), (1 << 40,), (1 << 62, 4), (2.5,), "x", None],
    "data_offsets": [[0, 0], [0, 1 << 62], [4, 0], [-4, 0], [0], None],
}
_NUMBERS = (0, -1, 1, 2, 3, 17, 10**4, 10**6, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), "3", None, [])
_NUMBERS += (True,)
_HEAD = dict(d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=1)
_RESNET = dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False)
_HGNET = dict(type="TimmBackbone", name="hgnetv2_b0", out_features=["res4", "res5"], pretrained=False)
_HGNET |= dict(pixel_mean=[0.0] * 3, pixel_std=[1.0] * 3)
_WINDOWED = dict(type="WindowedViT", image_size=32, patch_size=8, d_model=16, depth=2, num_heads=2, num_windows=2)
_WINDOWED |= dict(out_features=["block1", "block2"], global_blocks=[1], pretrained=False)
_SPECS: dict[str, dict[str, Any]] = {
    "vit": CLASSIFIER,
    "detr": dict(
        **dict(type="DETR", num_queries=5, backbone=_RESNET, neck=dict(type="ChannelProjection", out_channels=32)),
        head=dict(type="DETRHead", dropout=0.1, num_encoder_layers=1, **_HEAD),
    ),
    "d_fine": dict(
        **dict(type="DFINE", num_queries=4, num_detections=4, backbone=_HGNET),
        neck=dict(type="DFINEEncoder", out_channels=32, num_blocks=1, num_heads=2, d_ffn=32),
        head=dict(type="DFINEHead", num_points=[2, 2], **_HEAD),
    ),
    "rf_detr": dict(
        **dict(type="RFDETR", num_queries=5, num_detections=5, backbone=_WINDOWED),
        neck=dict(type="C2fProjection", in_features=["block1", "block2"], out_channels=32, num_blocks=1),
        head=dict(type="RFDETRHead", num_cross_heads=2, num_points=2, **_HEAD),
    ),
}


@cache
def sound_folder() -> dict[str, bytes]:
    """Return the files of a small classifier that the library wrote, by their names."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(**_SIZES, patch_size=16, num_labels=3, layer_norm_eps=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        transformers.ViTForImageClassification(config).save_pretrained(folder)
        statistics = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": 32, "width": 32})
        Path(folder, "preprocessor_config.json").write_text(json.dumps(statistics))
        return _loaded(folder)


@cache
def sound_own(kind: str) -> dict[str, bytes]:
    """Return the files of a small model that vitkit wrote, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), small_predictor(_SPECS[kind]), _SPECS[kind])
        return _loaded(folder)


def _loaded(folder: str) -> dict[str, bytes]:
    vitkit.load(folder)  # imports everything, once
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _write_folder(rng: random.Random, folder: Path, world: Path) -> None:
    files = dict(sound_folder())
    weights = files.pop("model.safetensors")
    layout = rng.choice(["safetensors", "safetensors", "index", "bin"])
    if layout == "bin":
        torch.save(load(weights), folder / "pytorch_model.bin")
        files["pytorch_model.bin"] = (folder / "pytorch_model.bin").read_bytes()
    elif layout == "index":
        tensors = load(weights)
        parts = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
        files |= {name: save({key: tensors[key] for key in keys}, {"format": "pt"}) for name, keys in parts.items()}
        index = {"metadata": {}, "weight_map": {key: name for name, keys in parts.items() for key in keys}}
        files["model.safetensors.index.json"] = json.dumps(index).encode()
    else:
        files["model.safetensors"] = weights
    name = rng.choice([name for name in files if name != "generation_config.json"] + ["config.json"] * 3)
    if name.endswith(".json"):
        files[name] = mutate_json(json.loads(files[name]), rng)
    elif name.endswith(".bin"):
        files[name] = rng.choice([mutate_bytes, _with_other_pickle])(files[name], rng)
    else:
        files[name] = rng.choice([mutate_bytes, _with_other_header])(files[name], rng)
    if rng.random() < 0.05:
        del files[rng.choice(list(files))]
    _write_files(folder, files)


def _with_other_pickle(data: bytes, rng: random.Random) -> bytes:
    return with_entry(data, "data.pkl", lambda content: mutate_bytes(content, rng))


def _with_other_header(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a .safetensors file, which describes its tensors."""
    header, tensors = split_safetensors(data)
    tensor = header[rng.choice([key for key in header if key != "__metadata__"])]
    field = rng.choice(list(_TENSOR_FIELDS))
    tensor[field] = rng.choice(_TENSOR_FIELDS[field])
    return join_safetensors(header, tensors)


def check_folder(folder: Path, world: Path) -> None:
    """Check that an accepted model classifies an image, with finite scores unless the weights are not finite."""
    predictor = vitkit.load(str(folder))
    prediction = predictor(GRAY)
    finite = all(bool(value.isfinite().all()) for value in predictor.model.state_dict().values())
    scores = [answer["score"] for answer in prediction.to_json()["classes"]]
    assert scores and (not finite or np.isfinite(scores).all())
    assert finite or "NaN or infinite" in str(predictor.report)


def _write_sizes(rng: random.Random, folder: Path, world: Path) -> None:
    files = dict(sound_own(rng.choice(["vit", *_SPECS])))
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
    _write_files(folder, files)


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)


def check_sizes(folder: Path, world: Path) -> None:
    """Check that an accepted model predicts."""
    prediction = vitkit.load(str(folder))(GRAY).to_json()
    assert prediction["width"] == prediction["height"] == 32


FORMATS = [Format("folders", _write_sizes, check_sizes, VitkitError, 4, lambda *_: [*map(sound_own, _SPECS)])]
if transformers is not None:
    FORMATS.append(Format("transformers", _write_folder, check_folder, VitkitError, 1, lambda *_: sound_folder()))
