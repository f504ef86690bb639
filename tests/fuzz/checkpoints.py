"""Checkpoints: damaged files, wrong contents, other projects' formats, and files that are not checkpoints."""

import io
import json
import math
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz.formats import Format, naming
from fuzz.mutate import JUNK, mutate_bytes
from torch import nn

from vitkit import load_weights
from vitkit.checkpoint import classes_of, read_checkpoint
from vitkit.errors import CheckpointError
from vitkit.seq2seq.vocabulary import Vocabulary, vocabularies_from_json

CLASSES = ["cat", "dog"]
_TEXTS = (
    b"import torch\n",
    b"{}",
    b"",
    b"0 1 2 3\n",
    b"<html></html>",
    b"(dp0\n.",
    b"]q.",
    b"\x80\x02.",
    b"PK\x03\x04",
    b"I1\n.",
)


class Small(nn.Module):
    """The model of the checkpoints."""

    class_head = ("head.",)

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)


def sound() -> dict[str, Any]:
    """A checkpoint as a run writes it; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    state = {
        key: torch.randn(value.shape, generator=generator) if value.is_floating_point() else value.clone()
        for key, value in Small().state_dict().items()
    }
    words = Vocabulary.train("word", ["a cat on a mat"]).to_json()
    return {
        "model": state,
        "classes": CLASSES,
        "config": json.dumps({"model": {"type": "Classifier", "backbone": "resnet18"}}),
        "progress": {"epoch": 3, "best": 0.5},
        "vocabularies": {"target": words},
    }


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    suffix = rng.choice(["pth", "pth", "pth", "npz", "pkl"])
    path = folder / f"fuzzed.{suffix}"
    action = rng.choice(["bytes", "bytes", "contents", "contents", "pickle", "text", "other"])
    saved = sound()
    if action == "contents":
        saved = mutate_state(saved, rng)
    if action == "text":
        path.write_bytes(rng.choice([*_TEXTS, rng.randbytes(100), b"a" * 10_000]))
    elif suffix == "npz":
        path.write_bytes(odd_arrays(rng))
    elif suffix == "pkl":
        path.write_bytes(odd_pickle(rng))
    else:
        file = io.BytesIO()
        torch.save(saved, file, _use_new_zipfile_serialization=rng.random() < 0.8)
        data = file.getvalue()
        if action == "pickle" and zipfile.is_zipfile(io.BytesIO(data)):
            data = with_entry(data, "data.pkl", lambda content: mutate_bytes(content, rng))
        elif action in ("bytes", "other", "pickle"):
            data = mutate_bytes(data, rng)
        path.write_bytes(data)


def with_entry(data: bytes, name: str, change: Any) -> bytes:
    """A zip file with a changed entry, whose checksums are right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith(name) else content)
    return changed.getvalue()


def odd_arrays(rng: random.Random) -> bytes:
    """Return a file of arrays, one of which has a wrong type or shape in its header, or is damaged."""
    file = io.BytesIO()
    np.savez(file, **{key: value.numpy() for key, value in sound()["model"].items()})
    if rng.random() < 0.4:
        return mutate_bytes(file.getvalue(), rng)
    claim = {
        "descr": rng.choice(["<f4", "<f8", "|O", "|V2", "<U9", "<M8[s]", "<c16", ">f4", "|b1", "<f99", [("a", "<f4")]]),
        "fortran_order": rng.choice([False, True, 3]),
        "shape": rng.choice([(4, 3, 3, 3), (), (0,), (1 << 33,), (1 << 50,), (-1,), (1 << 20, 1 << 20), (2.5,), "x"]),
    }
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {**claim, "shape": ()})
    text = header.getvalue().replace(b"'shape': ()", f"'shape': {claim['shape']!r}".encode())
    return with_entry(file.getvalue(), rng.choice(["body.weight.npy", "head.bias.npy"]), lambda _: text)


def odd_pickle(rng: random.Random) -> bytes:
    """A pickle of arrays, damaged or with other contents."""
    arrays: dict[Any, Any] = {key: value.numpy() for key, value in sound()["model"].items()}
    if rng.random() < 0.5:
        key = rng.choice(list(arrays))
        others = [
            np.array(["a"]),
            np.array([None]),
            np.zeros(3, ">f4"),
            np.zeros(2, np.uint64),
            np.float32(2),
            np.ma.zeros(2),
        ]
        arrays[key] = rng.choice([*JUNK, *others])
        return pickle.dumps({"model": arrays}, protocol=rng.choice([0, 2, 5]))
    return mutate_bytes(pickle.dumps({"model": arrays}, protocol=rng.choice([0, 2, 5])), rng)


def mutate_state(saved: dict[str, Any], rng: random.Random) -> Any:
    """A checkpoint with a part that is missing, of another kind or shape, or under another name."""
    state: dict[Any, Any] = {**saved, "model": dict(saved["model"])}
    owner: dict[Any, Any] = rng.choice([state, state["model"], state["model"]])
    key = rng.choice(list(owner))
    tensors = [torch.zeros(0), torch.zeros(4, 3, 3, 3, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.complex64)]
    tensors += [
        torch.tensor(math.nan),
        torch.zeros(5, 4),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(2, 2).to_sparse(),
    ]
    tensors += [torch.zeros(4).as_strided((2**40,), (0,)), torch.empty(4, device="meta"), torch.full((2,), math.inf)]
    action = rng.choice(["junk", "junk", "tensor", "tensor", "remove", "rename", "shards"])
    if action == "junk":
        owner[key] = rng.choice(JUNK)
    elif action == "tensor":
        owner[key] = rng.choice(tensors)
    elif action == "remove":
        del owner[key]
    elif action == "shards":
        state["shards"] = rng.choice(
            [{"folder": "../x"}, {"folder": "/"}, {}, {"folder": None, "files": [1]}, {"folder": "x", "ranks": -1}]
        )
    else:
        owner[rng.choice(["module.x", "", "x", 3, None, "ema", "state_dict", "body.weight.x"])] = owner.pop(key)
    return rng.choice([state] * 9 + [rng.choice(JUNK)])


def check(folder: Path, world: Path) -> None:
    """Check that loaded tensors fit the model; a damaged file must give the original tensors or be refused."""
    path = next(folder.glob("fuzzed.*"))
    with naming(path.name):
        checkpoint = read_checkpoint(path)
        classes_of(checkpoint, path.name)
        model = Small()
        report = load_weights(model, path, classes=CLASSES)
    vocabularies = vocabularies_from_json(checkpoint.get("vocabularies"))
    assert all(len(vocabulary) >= 4 for vocabulary in vocabularies.values())
    state = model.state_dict()
    finite = {key: bool(value.isfinite().all()) for key, value in state.items()}
    assert all(finite.values()) or report.not_finite, finite
    assert all(state[key].shape == value.shape for key, value in sound()["model"].items())


FORMATS = [Format("checkpoints", _write, check, CheckpointError, 6)]
