"""Exported files: programs of torch.export, which are archives of JSON, tensors and pickles, and ONNX files."""

import io
import json
import pickle
import random
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.formats import Format
from fuzz.guard import MARKER, OPTIONS, guarded
from fuzz.hostile import CODE, NAMES, PATHS, VALUES
from fuzz.mutate import mutate_bytes, mutate_json

import vitkit
from vitkit import build_model
from vitkit.apps.deployment.export import export_model
from vitkit.apps.deployment.metadata import describe
from vitkit.apps.exported.settings import ExportSettings
from vitkit.apps.inference import Predictor
from vitkit.errors import VitkitError

try:
    import onnx
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError:
    onnx = None

_BACKBONE = dict(type="ViT", d_model=16, depth=1, num_heads=2, patch_size=16, image_size=32, pretrained=False)
_FILE, _ONNX = "tiny.pt2", "tiny.onnx"


@cache
def sound() -> dict[str, bytes]:
    """Return the members of a small classifier's program."""
    torch.manual_seed(0)
    config = dict(model=dict(type="Classifier", backbone=_BACKBONE))
    predictor = Predictor(build_model(config["model"], classes=["cat", "dog"]), ["cat", "dog"])
    about = describe(predictor, config, name="tiny", license=None)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, _FILE)
        export_model(predictor, path, ExportSettings("torch"), images=[np.zeros((32, 32, 3), np.uint8)], metadata=about)
        vitkit.load(path, trust=True)(np.zeros((32, 32, 3), np.uint8))  # imports everything, once
        with zipfile.ZipFile(path) as file:
            return {info.filename: file.read(info) for info in file.infolist()}


class _Smuggled:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> tuple:
        return exec, (CODE,)


def _smuggled(rng: random.Random) -> bytes:
    """Return a pickle or a file of tensors that runs code when it is read."""
    kind = rng.choice(["save", "save", "old", "pickle", "nested", "script"])
    if kind == "pickle":
        return pickle.dumps(_Smuggled())
    file = io.BytesIO()
    value: Any = {"save": _Smuggled(), "nested": {"a": [torch.zeros(2), _Smuggled()]}}.get(kind, [_Smuggled()])
    if kind == "script":
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
    else:
        torch.save(value, file, _use_new_zipfile_serialization=kind != "old")
    return file.getvalue()


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    members, extra = dict(sound()), []
    sample = next(name for name in members if "sample_inputs" in name)
    top = sample.split("/")[0]
    action = rng.choice(
        ["smuggle", "smuggle", "smuggle", "json", "json", "json", "member", "remove", "bytes", "about", "new"]
    )
    compression = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    if action == "smuggle":
        names = [
            sample,
            *rng.sample(list(members), 2),
            f"{top}/data/constants/opaque_0",
            f"{top}/data/weights/weight_99",
        ]
        members[rng.choice(names[:3] + names)] = _smuggled(rng)
    elif action == "json":
        name = rng.choice([name for name in members if name.endswith(".json")])
        members[name] = mutate_json(json.loads(members[name]), rng, VALUES)
    elif action == "about":
        name = next(name for name in members if name.endswith("vitkit.json"))
        about = json.loads(members[name])
        key = rng.choice(list(about))
        about[key] = rng.choice([about[key], json.dumps(rng.choice([1, [], {}, None, "x"])), *VALUES[:20]])
        if rng.random() < 0.3:
            config = {"model": {"type": "Classifier", "backbone": _BACKBONE | {"d_model": 1 << 20}}}
            about["config"] = rng.choice(
                [json.dumps(config), config, '{"imports": ["evil"]}', '{"imports": ["data.evil"]}']
            )
        members[name] = json.dumps(about).encode()
    elif action == "member":
        name = rng.choice(list(members))
        members[name] = mutate_bytes(members[name], rng)
    elif action == "remove":
        del members[rng.choice(list(members))]
    elif action == "new":
        bomb = b"\0" * (64 << 20)
        name, content = rng.choice(
            [("../../victim/new.jpg", b"x"), (f"{top}/code/x.py", CODE.encode()), (f"{top}/data/weights/bomb", bomb)]
            + [(f"{top}/data.pkl", _smuggled(rng)), (f"{top}/constants.pkl", _smuggled(rng)), (sample, _smuggled(rng))]
            + [
                (MARKER, b"x"),
                (f"{top}/data/aotinductor/model/x.so", b"\x7fELF"),
                (f"{top}/data/constants/custom_obj_0", _smuggled(rng)),
            ]
        )
        compression = zipfile.ZIP_DEFLATED if content == bomb else compression
        extra.append((name, content))
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of members with one name
        for name, content in [*members.items(), *extra]:
            archive.writestr(name, content)
    data = file.getvalue()
    (folder / "data").mkdir()
    (folder / "data" / "evil.py").write_text(f"{CODE}\n")
    (folder / "data" / _FILE).write_bytes(mutate_bytes(data, rng) if action == "bytes" else data)
    # What the user trusts may run code, so that only files without any are trusted.
    trust = action not in ("smuggle", "new") and rng.random() < 0.7
    (folder / OPTIONS).write_text(json.dumps({"trust": trust}))


def check(folder: Path, world: Path) -> None:
    """Check that an accepted program classifies an image, and that one that is not trusted runs no code."""
    with guarded(folder, world) as options, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prediction = vitkit.load(f"data/{_FILE}", trust=options["trust"])(np.full((32, 32, 3), 128, np.uint8))
        assert prediction.to_json()["classes"]


@cache
def sound_onnx() -> bytes:
    """Return a small classifier's ONNX file."""
    torch.manual_seed(0)
    config = dict(model=dict(type="Classifier", backbone=_BACKBONE))
    predictor = Predictor(build_model(config["model"], classes=["cat", "dog"]), ["cat", "dog"])
    about = describe(predictor, config, name="tiny", license=None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, _ONNX)
        export_model(predictor, path, ExportSettings("onnx"), images=[np.zeros((32, 32, 3), np.uint8)], metadata=about)
        vitkit.load(path)(np.zeros((32, 32, 3), np.uint8))  # imports everything, once
        return path.read_bytes()


def _write_onnx(rng: random.Random, folder: Path, world: Path) -> None:
    (folder / "data").mkdir()
    (folder / OPTIONS).write_text("{}")
    model = onnx.load_from_string(sound_onnx())
    action = rng.choice(["about", "about", "about", "about", "bytes", "outside", "names"])
    if action == "about":
        entry = rng.choice(model.metadata_props)
        entry.value = mutate_json(json.loads(entry.value), rng, [*VALUES, [1e9], [32], [0, 32]]).decode(
            "utf-8", "replace"
        )
        if rng.random() < 0.2:
            del model.metadata_props[rng.randrange(len(model.metadata_props))]
    elif action == "outside":  # weights that are in another file
        tensor = rng.choice(model.graph.initializer)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = tensor.external_data.add()
        place.key, place.value = "location", rng.choice(PATHS)
    elif action == "names":
        value = rng.choice([*model.graph.input, *model.graph.output])
        value.name = rng.choice(NAMES).encode("utf-8", "replace").decode()
    data = model.SerializeToString()
    (folder / "data" / _ONNX).write_bytes(mutate_bytes(data, rng) if action == "bytes" else data)


def check_onnx(folder: Path, world: Path) -> None:
    """Check that an accepted file classifies an image."""
    with guarded(folder, world):
        prediction = vitkit.load(f"data/{_ONNX}")(np.full((32, 32, 3), 128, np.uint8))
        assert prediction.to_json()["classes"]


FORMATS = [Format("programs", _write, check, VitkitError, 3, sound)]
if onnx is not None:
    FORMATS.append(Format("onnx", _write_onnx, check_onnx, VitkitError, 2, sound_onnx))
