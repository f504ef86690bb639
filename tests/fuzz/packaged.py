"""Models in .safetensors files, such as those in the package, whose header holds config, classes and vocabularies."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.archives import join_safetensors, saved, split_safetensors
from fuzz.checkpoints import mutate_state
from fuzz.configs import JUNK
from fuzz.formats import Format, write_data, write_options
from fuzz.guard import guarded, run_tool
from fuzz.hostile import CODE, VALUES
from fuzz.mutate import mutate_bytes, mutate_json, mutate_value
from safetensors.torch import load

from vitkit.errors import VitkitError
from vitkit.tools import predict, train, translate
from vitkit.weights.published import fetch_published
from vitkit.weights.transformers_folder import METADATA

_NAMES = ("shapes_vit", "shapes_vit", "shapes_dino", "shapes_mask2former", "shapes_captioner", "numbers_translator")
_FILE = "model.safetensors"


@cache
def sound(name: str) -> tuple[dict[str, Any], bytes]:
    """Return the header of a packaged model's file, and the bytes of its tensors."""
    return split_safetensors(fetch_published(name).read_bytes())


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
    write_data(folder, _FILE, join_safetensors(header, tensors))
    write_data(folder, "evil.py", f"{CODE}\n")
    write_options(folder, is_text=name == "numbers_translator")


def check(folder: Path, world: Path) -> None:
    """Check that an accepted model predicts, and that no code is imported for it."""
    with guarded(folder, world) as options:
        if options["is_text"]:
            assert run_tool(translate.main, [f"data/{_FILE}", "forty-two"]).strip()
        else:
            shutil.copy(world / "images" / "0.jpg", "tmp/0.jpg")
            settings = ["--input", "tmp/0.jpg", "--out", "out/predicted", "--device", "cpu"]
            run_tool(predict.main, [f"data/{_FILE}", *settings])
            assert any(Path("out/predicted").iterdir())


def _write_init(rng: random.Random, folder: Path, world: Path) -> None:
    """Write weights for another run to start from: a run's checkpoint with other classes, or a packaged file."""
    header, tensors = sound("shapes_vit")
    data = join_safetensors(header, tensors)
    if rng.random() < 0.3:
        write_data(folder, _FILE, mutate_bytes(data, rng))
    else:
        entries = json.loads(header["__metadata__"][METADATA])
        classes = rng.choice([entries["classes"], ["cat", "dog"], entries["classes"][::-1]])
        checkpoint = {"model": load(data), "config": entries["config"], "classes": classes, "progress": {"epoch": 3}}
        content = saved(mutate_state(checkpoint, rng) if rng.random() < 0.7 else checkpoint)
        write_data(folder, "model.pth", mutate_bytes(content, rng) if rng.random() < 0.3 else content)
    write_options(folder)


def check_init(folder: Path, world: Path) -> None:
    """Check that a run could start from accepted weights."""
    with guarded(folder, world):
        path = next(Path("data").glob("model.*"))
        sizes = ["data.train.num_images=4", "data.val.num_images=2", "data.images_per_gpu=2", "data.num_workers=0"]
        run_tool(train.main, ["quickstart/vit", *sizes, "--check", "--init", str(path), "--device", "cpu"])


FORMATS = [
    Format("packaged", _write, check, VitkitError, 4, lambda *_: [sound(name) for name in _NAMES]),
    Format("init", _write_init, check_init, VitkitError, 2, lambda *_: sound("shapes_vit")),
]
