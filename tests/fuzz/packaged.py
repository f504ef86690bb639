"""Models in .safetensors files, such as those in the package, whose header holds config, classes and vocabularies."""

import io
import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz.checkpoints import mutate_state
from fuzz.configs import JUNK
from fuzz.formats import Format
from fuzz.guard import OPTIONS, guarded, run_tool
from fuzz.hostile import CODE, VALUES
from fuzz.mutate import mutate_bytes, mutate_json, mutate_value
from safetensors.torch import load

from vitkit import model_zoo
from vitkit.errors import VitkitError
from vitkit.tools import predict, train, translate
from vitkit.weights.transformers_folder import METADATA

_NAMES = ("shapes_vit", "shapes_vit", "shapes_dino", "shapes_mask2former", "shapes_captioner", "numbers_translator")
_FILE = "data/model.safetensors"


@cache
def sound(name: str) -> tuple[dict[str, Any], bytes]:
    """Return the header of a packaged model's file, and the bytes of its tensors."""
    data = model_zoo.published_weights(name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    name = rng.choice(_NAMES)
    header, tensors = sound(name)
    entries = json.loads(header["__metadata__"][METADATA])
    action = rng.choice(["config", "config", "config", "entries", "entries", "text", "tensors", "imports"])
    if action == "config":
        entries["config"] = mutate_json(json.loads(entries["config"]), rng, JUNK).decode("utf-8", "replace")
    elif action == "entries":
        entries = mutate_value(entries, rng, [*JUNK, *VALUES])
    elif action == "imports":
        config = json.loads(entries["config"])
        config["imports"] = rng.choice([["evil"], ["data.evil"], ["data/evil.py"], "evil", [["evil"]], [None]])
        entries["config"] = json.dumps(config)
    text = json.dumps(entries)
    if action == "text":
        text = mutate_bytes(text.encode(), rng).decode("utf-8", "replace")
    header = {**header, "__metadata__": {**header["__metadata__"], METADATA: text}}
    if action == "tensors":
        header = {**header, **mutate_value({key: header[key] for key in list(header)[1:4]}, rng)}
    raw = json.dumps(header).encode()
    (folder / "data").mkdir()
    (folder / _FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + tensors)
    (folder / "data" / "evil.py").write_text(f"{CODE}\n")
    (folder / OPTIONS).write_text(json.dumps({"is_text": name == "numbers_translator"}))


def check(folder: Path, world: Path) -> None:
    """Check that an accepted model predicts, and that no code is imported for it."""
    with guarded(folder, world) as options:
        if options["is_text"]:
            assert run_tool(translate.main, [_FILE, "forty-two"]).strip()
        else:
            shutil.copy(world / "images" / "0.jpg", "tmp/0.jpg")
            run_tool(predict.main, [_FILE, "--input", "tmp/0.jpg", "--out", "out/predicted", "--device", "cpu"])
            assert any(Path("out/predicted").iterdir())


@cache
def _warm_up() -> None:
    for name in set(_NAMES):
        sound(name)


def _write_init(rng: random.Random, folder: Path, world: Path) -> None:
    """Write weights for another run to start from: a run's checkpoint with other classes, or a packaged file."""
    (folder / "data").mkdir()
    header, tensors = sound("shapes_vit")
    raw = json.dumps(header).encode()
    data = len(raw).to_bytes(8, "little") + raw + tensors
    if rng.random() < 0.3:
        (folder / _FILE).write_bytes(mutate_bytes(data, rng))
    else:
        entries = json.loads(header["__metadata__"][METADATA])
        classes = rng.choice([entries["classes"], ["cat", "dog"], entries["classes"][::-1]])
        saved = {"model": load(data), "config": entries["config"], "classes": classes, "progress": {"epoch": 3}}
        if rng.random() < 0.7:
            saved = mutate_state(saved, rng)
        file = io.BytesIO()
        torch.save(saved, file)
        content = mutate_bytes(file.getvalue(), rng) if rng.random() < 0.3 else file.getvalue()
        (folder / "data" / "model.pth").write_bytes(content)
    (folder / OPTIONS).write_text("{}")


def check_init(folder: Path, world: Path) -> None:
    """Check that a run could start from accepted weights."""
    with guarded(folder, world):
        path = next(Path("data").glob("model.*"))
        sizes = ["data.train.num_images=4", "data.val.num_images=2", "data.images_per_gpu=2", "data.num_workers=0"]
        run_tool(train.main, ["quickstart/vit", *sizes, "--check", "--init", str(path), "--device", "cpu"])


FORMATS = [
    Format("packaged", _write, check, VitkitError, 4, _warm_up),
    Format("init", _write_init, check_init, VitkitError, 2, _warm_up),
]
