"""Folders of the transformers library: settings, weights in one file or in several with an index."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from fuzz.checkpoints import with_entry
from fuzz.formats import Format
from fuzz.mutate import mutate_bytes, mutate_json

import vitkit
from vitkit.errors import VitkitError

try:
    import transformers
    from safetensors.torch import load, save
except ImportError:
    transformers = None

_SIZES = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16,
    num_labels=3, layer_norm_eps=1e-6,
)  # fmt: skip


@cache
def sound_folder() -> dict[str, bytes]:
    """The content of a small classifier's files by their names."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.ViTForImageClassification(transformers.ViTConfig(**_SIZES)).save_pretrained(folder)
        statistics = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"height": 32, "width": 32})
        Path(folder, "preprocessor_config.json").write_text(json.dumps(statistics))
        vitkit.load(folder)  # imports everything, once
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _write(rng: random.Random, folder: Path, world: Path) -> None:
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
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _with_other_pickle(data: bytes, rng: random.Random) -> bytes:
    return with_entry(data, "data.pkl", lambda content: mutate_bytes(content, rng))


def _with_other_header(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a .safetensors file, which describes its tensors."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensor = header[rng.choice([key for key in header if key != "__metadata__"])]
    field = rng.choice(["dtype", "shape", "data_offsets"])
    values = {
        "dtype": ["F16", "I64", "BOOL", "F99", 3],
        "shape": [(), (0,), (-1,), (3,), (1 << 40,), (1 << 62, 4), (2.5,), "x", None],
        "data_offsets": [[0, 0], [0, 1 << 62], [4, 0], [-4, 0], [0], None],
    }
    tensor[field] = rng.choice(values[field])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def check(folder: Path, world: Path) -> None:
    """Check that an accepted model classifies an image, with finite scores unless the weights are not finite."""
    predictor = vitkit.load(str(folder))
    prediction = predictor(np.full((32, 32, 3), 128, np.uint8))
    finite = all(bool(value.isfinite().all()) for value in predictor.model.state_dict().values())
    scores = [answer["score"] for answer in prediction.to_json()["classes"]]
    assert scores and (not finite or np.isfinite(scores).all())
    assert finite or "NaN or infinite" in str(predictor.report)


FORMATS = [Format("transformers", _write, check, VitkitError, 1, sound_folder)] if transformers is not None else []
