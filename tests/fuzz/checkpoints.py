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
from fuzz.archives import join_safetensors, saved, split_safetensors, with_entry
from fuzz.formats import Format, naming
from fuzz.mutate import JUNK, mutate_bytes, mutate_json
from safetensors.torch import save as save_safetensors
from torch import nn

from vitkit import load_weights
from vitkit.errors import CheckpointError
from vitkit.text.vocabulary import Vocabulary, vocabularies_from_json
from vitkit.weights import classes_of, read_checkpoint

CLASSES = ["cat", "dog"]
_TEXTS = (b"import torch\n", b"{}", b"", b"0 1 2 3\n", b"<html></html>", b"(dp0\n.", b"]q.", b"\x80\x02.")
_TEXTS += (b"PK\x03\x04", b"I1\n.")
_ARRAYS = (np.array(["a"]), np.array([None]), np.zeros(3, ">f4"), np.zeros(2, np.uint64), np.float32(2), np.ma.zeros(2))
_TENSORS = (torch.zeros(0), torch.zeros(4, 3, 3, 3, dtype=torch.int8), torch.zeros(2, 4, dtype=torch.complex64))
_TENSORS += (torch.tensor(math.nan), torch.zeros(5, 4), torch.zeros(4, dtype=torch.bool), torch.zeros(2, 2).to_sparse())
_TENSORS += (torch.zeros(4).as_strided((2**40,), (0,)), torch.empty(4, device="meta"), torch.full((2,), math.inf))
_SHARDS = ({"folder": "../x"}, {"folder": "/"}, {}, {"folder": None, "files": [1]}, {"folder": "x", "ranks": -1})
_KEYS = ("module.x", "", "x", 3, None, "ema", "state_dict", "body.weight.x")
_TENSOR_FIELDS: dict[str, list[Any]] = {
    "dtype": ["F16", "I64", "BOOL", "F99", "F8_E4M3", 3, None],
    "shape": [[], [0], [-1], [3], [1 << 40], [1 << 62, 4], [2.5], "x", None, [1] * 100_000, [4, 3, 3, 3, 1]],
    "data_offsets": [[0, 0], [0, 1 << 62], [4, 0], [-4, 0], [0], None, [0, 4], [1, 5]],
}
_SIZES = (b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80", b"\x01\0\0\0", b"\xff\xff\xff\x7f")
_PICKLED = (b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"K\0", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"K\xff")
"""Numbers in a pickle."""


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
    checkpoint = mutate_state(sound(), rng) if action == "contents" else sound()
    if action == "text":
        path.write_bytes(rng.choice([*_TEXTS, rng.randbytes(100), b"a" * 10_000]))
    elif suffix == "npz":
        path.write_bytes(odd_arrays(rng))
    elif suffix == "pkl":
        path.write_bytes(odd_pickle(rng))
    else:
        data = saved(checkpoint, _use_new_zipfile_serialization=rng.random() < 0.8)
        if action == "pickle" and zipfile.is_zipfile(io.BytesIO(data)):
            data = with_entry(data, "data.pkl", lambda content: mutate_bytes(content, rng))
        elif action in ("bytes", "other", "pickle"):
            data = mutate_bytes(data, rng)
        path.write_bytes(data)


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
        arrays[key] = rng.choice([*JUNK, *_ARRAYS])
        return pickle.dumps({"model": arrays}, protocol=rng.choice([0, 2, 5]))
    return mutate_bytes(pickle.dumps({"model": arrays}, protocol=rng.choice([0, 2, 5])), rng)


def mutate_state(checkpoint: dict[str, Any], rng: random.Random) -> Any:
    """A checkpoint with a part that is missing, of another kind or shape, or under another name."""
    state: dict[Any, Any] = {**checkpoint, "model": dict(checkpoint["model"])}
    owner: dict[Any, Any] = rng.choice([state, state["model"], state["model"]])
    key = rng.choice(list(owner))
    action = rng.choice(["junk", "junk", "tensor", "tensor", "remove", "rename", "shards"])
    if action == "junk":
        owner[key] = rng.choice(JUNK)
    elif action == "tensor":
        owner[key] = rng.choice(_TENSORS)
    elif action == "remove":
        del owner[key]
    elif action == "shards":
        state["shards"] = rng.choice(_SHARDS)
    else:
        owner[rng.choice(_KEYS)] = owner.pop(key)
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


def _write_headers(rng: random.Random, folder: Path, world: Path) -> None:
    """Write a checkpoint whose claims of sizes, in the archive's or in the file's header, are wrong."""
    if rng.random() < 0.5:
        (folder / "fuzzed.safetensors").write_bytes(odd_safetensors(rng))
        return
    checkpoint = sound()
    action = rng.choice(["sizes", "sizes", "bomb", "bomb tensor", "members", "pickle", "nested"])
    if action == "nested":
        value: Any = torch.zeros(1)
        for _ in range(rng.choice([100, 900, 5000])):
            value = [value] if rng.random() < 0.5 else {"a": value}
        checkpoint["progress"] = value
    file = io.BytesIO()
    try:
        torch.save(checkpoint, file)
    except RecursionError:
        file.write(b"PK")
    data = file.getvalue()
    if action == "bomb":  # opcodes that a pickle's reader keeps: a text of 100 MB, or many marks
        junk = rng.choice([b"X\x00\x00\x00\x06" + b"x" * (6 << 24), b"(" * (96 << 20), b"K\x01" * (40 << 20) + b"."])
        data = with_entry(data, "data.pkl", lambda content: content[:2] + junk + content[2:], zipfile.ZIP_DEFLATED)
    elif action == "bomb tensor":
        data = with_entry(data, "data/0", lambda content: bytes(1 << 27), zipfile.ZIP_DEFLATED)
    elif action == "pickle":
        data = with_entry(data, "data.pkl", lambda content: _with_other_numbers(content, rng))
    elif action == "members":
        name = rng.choice(["data.pkl", "data/0", "data/1", "version", "byteorder"])
        data = with_entry(data, name, lambda content: rng.choice([b"", content[:-1], content * 2, b"big", b"\0" * 9]))
    elif action == "sizes":
        data = bytearray(data)
        starts = [k for k in range(len(data) - 46) if data[k : k + 4] in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06")]
        start = rng.choice(starts) + rng.randrange(4, 46)
        data[start : start + 4] = rng.choice(_SIZES)
    (folder / "fuzzed.pth").write_bytes(bytes(data))


def _with_other_numbers(content: bytes, rng: random.Random) -> bytes:
    """Replace a small number of a pickle by another one, such as a size or a stride of a tensor."""
    k = rng.choice([k for k in range(len(content) - 1) if content[k : k + 1] == b"K"])
    return content[:k] + rng.choice(_PICKLED) + content[k + 2 :]


def odd_safetensors(rng: random.Random) -> bytes:
    """Return a .safetensors file with a wrong header."""
    state = dict(sound()["model"])
    data = save_safetensors(state, {"format": "pt"})
    header, tensors = split_safetensors(data)
    action = rng.choice(["header", "header", "value", "length", "deep", "metadata", "bytes", "many"])
    if action == "bytes":
        return mutate_bytes(data, rng)
    if action == "length":
        length = int.from_bytes(data[:8], "little")
        length = rng.choice([0, 1, length - 1, length + 1, 1 << 20, 1 << 40, (1 << 64) - 1])
        return length.to_bytes(8, "little") + data[8:]
    if action == "value":
        return join_safetensors(mutate_json(header, rng), tensors)
    if action == "deep":
        text = json.dumps(header).encode()[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        return join_safetensors(text, tensors)
    if action == "header":
        tensor, field = header[rng.choice(list(state))], rng.choice(list(_TENSOR_FIELDS))
        tensor[field] = rng.choice(_TENSOR_FIELDS[field])
    elif action == "metadata":
        header["__metadata__"] = rng.choice([{"format": "\x1b[31m"}, {"format": 1}, [], None, {"a": "x" * 100_000}])
    else:
        header |= {f"x{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(50_000)}
    return join_safetensors(header, tensors)


FORMATS = [
    Format("checkpoints", _write, check, CheckpointError, 6),
    Format("headers", _write_headers, check, CheckpointError, 4),
]
