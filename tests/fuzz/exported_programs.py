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
from fuzz.archives import saved
from fuzz.formats import Format, write_data, write_options
from fuzz.guard import MARKER, guarded
from fuzz.hostile import CODE, NAMES, PATHS, VALUES
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.world import CLASSIFIER, GRAY, small_predictor

import vitkit
from vitkit.apps.export_reading.settings import ExportSettings
from vitkit.apps.export_writing.export import export_model
from vitkit.apps.export_writing.metadata import describe
from vitkit.errors import VitkitError

try:
    import onnx
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401
except ImportError:
    onnx = None

BLACK = np.zeros((32, 32, 3), np.uint8)
_FILE, _ONNX = "tiny.pt2", "tiny.onnx"


@cache
def exported(name: str) -> bytes:
    """Return a small classifier's file."""
    predictor, config = small_predictor(CLASSIFIER), dict(model=CLASSIFIER)
    about = describe(predictor, config, name="tiny", license=None)
    settings = ExportSettings("onnx" if name == _ONNX else "torch")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, name)
        export_model(predictor, path, settings, images=[BLACK], metadata=about)
        vitkit.load(path, trust=True)(BLACK)  # imports everything, once
        return path.read_bytes()


def members_of(data: bytes) -> dict[str, bytes]:
    """Return the members of a program's archive."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
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
    if kind == "script":
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
        return file.getvalue()
    value: Any = {"save": _Smuggled(), "nested": {"a": [torch.zeros(2), _Smuggled()]}}.get(kind, [_Smuggled()])
    return saved(value, _use_new_zipfile_serialization=kind != "old")


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    members, extra = members_of(exported(_FILE)), []
    sample = next(name for name in members if "sample_inputs" in name)
    top = sample.split("/")[0]
    action = rng.choice(["smuggle"] * 3 + ["json"] * 3 + ["member", "remove", "bytes", "about", "new"])
    compression = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    if action == "smuggle":
        names = [sample, *rng.sample(list(members), 2)]
        added = [f"{top}/data/constants/opaque_0", f"{top}/data/weights/weight_99"]
        members[rng.choice(names * 2 + added)] = _smuggled(rng)
    elif action == "json":
        name = rng.choice([name for name in members if name.endswith(".json")])
        members[name] = mutate_json(json.loads(members[name]), rng, VALUES)
    elif action == "about":
        name = next(name for name in members if name.endswith("vitkit.json"))
        about = json.loads(members[name])
        key = rng.choice(list(about))
        about[key] = rng.choice([about[key], json.dumps(rng.choice([1, [], {}, None, "x"])), *VALUES[:20]])
        if rng.random() < 0.3:
            config = {"model": CLASSIFIER | {"backbone": CLASSIFIER["backbone"] | {"d_model": 1 << 20}}}
            imports = ['{"imports": ["evil"]}', '{"imports": ["data.evil"]}']
            about["config"] = rng.choice([json.dumps(config), config, *imports])
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
            + [(MARKER, b"x"), (f"{top}/data/aotinductor/model/x.so", b"\x7fELF")]
            + [(f"{top}/data/constants/custom_obj_0", _smuggled(rng))]
        )
        compression = zipfile.ZIP_DEFLATED if content == bomb else compression
        extra.append((name, content))
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of members with one name
        for name, content in [*members.items(), *extra]:
            archive.writestr(name, content)
    data = file.getvalue()
    write_data(folder, "evil.py", f"{CODE}\n")
    write_data(folder, _FILE, mutate_bytes(data, rng) if action == "bytes" else data)
    # What the user trusts may run code, so that only files without any are trusted.
    write_options(folder, trust=action not in ("smuggle", "new") and rng.random() < 0.7)


def check(folder: Path, world: Path) -> None:
    """Check that an accepted program classifies an image, and that one that is not trusted runs no code."""
    with guarded(folder, world) as options, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert vitkit.load(f"data/{_FILE}", trust=options["trust"])(GRAY).to_json()["classes"]


def _write_onnx(rng: random.Random, folder: Path, world: Path) -> None:
    model = onnx.load_from_string(exported(_ONNX))
    action = rng.choice(["about", "about", "about", "about", "bytes", "outside", "names"])
    if action == "about":
        entry = rng.choice(model.metadata_props)
        value = mutate_json(json.loads(entry.value), rng, [*VALUES, [1e9], [32], [0, 32]])
        entry.value = value.decode("utf-8", "replace")
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
    write_data(folder, _ONNX, mutate_bytes(data, rng) if action == "bytes" else data)
    write_options(folder)


def check_onnx(folder: Path, world: Path) -> None:
    """Check that an accepted file classifies an image."""
    with guarded(folder, world):
        assert vitkit.load(f"data/{_ONNX}")(GRAY).to_json()["classes"]


FORMATS = [Format("programs", _write, check, VitkitError, 3, lambda *_: exported(_FILE))]
if onnx is not None:
    FORMATS.append(Format("onnx", _write_onnx, check_onnx, VitkitError, 2, lambda *_: exported(_ONNX)))
