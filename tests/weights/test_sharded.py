"""Checkpoints with shards are read by one process, and no description of them runs code."""

import io
import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from vitkit.errors import CheckpointError
from vitkit.weights import read_checkpoint, save_checkpoint
from vitkit.weights.sharded import _describe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
LAST_NAME = "last.pth"


TENSORS = {"model/a": torch.arange(6.0).view(2, 3), "model/b.c": torch.ones(2, dtype=torch.bfloat16)}


class Harmful:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def saved(folder: Path, tensors=TENSORS) -> dict:
    """The description of shards that one process has written."""
    metadata = dcp.save(tensors, storage_writer=FileSystemWriter(folder / "a.shards"))
    file = folder / "a.shards" / "__0_0.distcp"
    files = {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())]}
    return {"folder": "a.shards", "files": files, "tensors": _describe(metadata)}


def read(folder: Path, shards: dict) -> dict:
    save_checkpoint(folder / LAST_NAME, {"epoch": 1, "shards": shards})
    return read_checkpoint(folder / LAST_NAME)


def test_sharded_checkpoint_is_read_without_a_process_group_and_from_any_folder(tmp_path):
    (tmp_path / "before").mkdir()
    shards = saved(tmp_path / "before")
    state = read((tmp_path / "before").rename(tmp_path / "after"), shards)
    assert state.keys() == {"epoch", "model"} and state["model"].keys() == {"a", "b.c"}
    assert all(state["model"][name.removeprefix("model/")].equal(value) for name, value in TENSORS.items())


def test_the_pickles_of_dcp_are_never_opened(tmp_path):
    """torch.distributed.checkpoint reads its own description, and entries of bytes, with weights_only=False."""
    ran = tmp_path / "ran"
    shards = saved(tmp_path)
    (tmp_path / "a.shards" / ".metadata").write_bytes(pickle.dumps(Harmful(ran)))
    assert read(tmp_path, shards)["model"]["a"].equal(TENSORS["model/a"])
    content = io.BytesIO()
    torch.save(Harmful(ran), content)
    shards["files"]["__0_0.distcp"] = [len(content.getvalue()), zlib.crc32(content.getvalue())]
    (tmp_path / "a.shards" / "__0_0.distcp").write_bytes(content.getvalue())
    chunk = [[0], [4], "__0_0.distcp", 0, len(content.getvalue())]
    shards["tensors"] = {"model/a": {"dtype": "float32", "size": [4], "chunks": [chunk]}}
    with pytest.raises(CheckpointError, match="its shards cannot be read"):
        read(tmp_path, shards)
    assert not ran.exists()


def described(**change):
    tensor = {"dtype": "float32", "size": [4], "chunks": [[[0], [4], "x", 0, 1]]} | change
    return {"folder": "a.shards", "files": {}, "tensors": {"model/a": tensor}}


@pytest.mark.parametrize(
    "shards",
    [
        {},
        {"folder": 3},
        {"folder": "a.shards", "files": []},
        {"folder": "a.shards", "files": {"x": None}},
        {"folder": "a.shards", "files": {}},
        {"folder": "a.shards", "files": {}, "tensors": {"model/a": {}}},
        {"folder": "a.shards", "files": {}, "tensors": {"epoch/a": described()["tensors"]["model/a"]}},
        described(chunks=[[[0], [2], "x", 0, 1]]),
        described(chunks=[]),
        described(dtype="nn"),
        described(chunks=[[[0], [4], "../x", 0, 1]]),
        described(chunks=[[[0, 0], [4, 1], "x", 0, 1]]),
    ],
)
def test_inconsistent_shard_metadata_is_an_error(tmp_path, shards):
    (tmp_path / "a.shards").mkdir()
    with pytest.raises(CheckpointError, match=r"last\.pth: (damaged|its shards cannot be read)"):
        read(tmp_path, shards)


@pytest.mark.parametrize("change", [(3, 7), (4, 9), (2, "../last.pth"), (1, [6])])
def test_wrong_chunk_metadata_is_an_error(tmp_path, change):
    shards = saved(tmp_path)
    shards["tensors"]["model/a"]["chunks"][0][change[0]] = change[1]
    with pytest.raises(CheckpointError, match=r"last\.pth: (damaged|its shards cannot be read)"):
        read(tmp_path, shards)
