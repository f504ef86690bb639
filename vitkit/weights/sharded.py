"""Checkpoints of sharded models: a file, and a folder beside it into which each rank writes its shards.

The folder is written by `torch.distributed.checkpoint` (dcp), and can be read by any number of ranks, or by one process
without a process group. The file contains everything that is not sharded, the names, sizes and checksums of the
folder's files, and a description, in plain values, of where each tensor is stored in them.
"""

import math
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from vitkit.distributed import broadcast_object, gather_objects, is_main, rank
from vitkit.errors import CheckpointError
from vitkit.io.atomic import TEMPORARY_SUFFIX, sync_folder


def write_shards(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write the state's DTensors, each rank its own shards, into a folder that does not exist yet.

    All ranks must call it. The folder has a temporary name until all files are on the disk.

    Args:
        state: nested dicts.
    Returns:
        the state without its DTensors, for the checkpoint's file, with "shards": the information for reading them.
    Raises:
        CheckpointError: raised on all ranks if one of them could not write. Nothing is left on the disk then.
    """
    rest, sharded = _split(state)
    temporary = folder.with_name(folder.name + TEMPORARY_SUFFIX)
    issue, checksums = None, {}
    try:
        metadata = dcp.save(dict(sharded), storage_writer=dcp.FileSystemWriter(temporary))
        for path in temporary.glob(f"__{rank()}_*.distcp"):
            checksums[path.name] = [path.stat().st_size, file_checksum(path)]
    except (CheckpointException, OSError) as error:  # dcp raises the error of any rank on all ranks
        issue = _reason(error)
    per_rank = gather_objects((issue, checksums))
    if is_main():
        issue = next((text for text, _ in per_rank if text), None) or _complete(temporary, folder)
    issue = broadcast_object(issue)
    if issue is not None:
        if is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: not saved ({issue}). Previous checkpoints are intact. Free some space, or check the disk."
        )
    files = {name: checksum for _, checksums in per_rank for name, checksum in checksums.items()}
    return {**rest, "shards": {"folder": folder.name, "files": files, "tensors": _describe(metadata)}}


def _complete(temporary: Path, folder: Path) -> str | None:
    """Rename a folder whose files are complete; return a description of the issue, if any."""
    try:
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        return _reason(error)
    return None


def check_shards(checkpoint: Path, shards: Mapping[str, Any], *, checksums: bool) -> None:
    """Check that the files that a checkpoint refers to exist.

    Args:
        checkpoint: the file beside the folder.
        shards: its entry "shards".
        checksums: also verify the checksums, for which all files are read.
    Raises:
        CheckpointError: files are missing or damaged; the error names them.
    """
    try:
        folder = _folder(checkpoint, shards)
        files = {Path(name).name: (int(size), int(checksum)) for name, (size, checksum) in shards["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damage_error(checkpoint) from error
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"{checkpoint}: most of it is in the folder '{folder.name}', which is not beside it. Copy both together."
        )
    missing = [name for name in files if not os.path.isfile(folder / name)]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: {len(missing)} of the {len(files)} shard files in '{folder}' are missing "
            f"({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}). Each contains a part of every weight: "
            "copy the whole folder again, or take another checkpoint."
        )
    for name, (size, checksum) in files.items():
        actual = (folder / name).stat().st_size
        if actual != size or (checksums and file_checksum(folder / name) != checksum):
            reason = f"it has {actual} bytes of {size}" if actual != size else "its checksum is wrong"
            raise CheckpointError(f"{folder / name}: truncated or damaged ({reason}). Get the file again.")


def read_full(checkpoint: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state with its full tensors, all read by this process.

    Args:
        state: content of the checkpoint's file; `check_shards` should have been called.
    Raises:
        CheckpointError: the shards cannot be read.
    """
    metadata = _metadata(checkpoint, state["shards"])
    stored = metadata.state_dict_metadata
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in stored.items()}
    _fill(checkpoint, state["shards"], metadata, tensors)
    full = {key: value for key, value in state.items() if key != "shards"}
    try:
        _insert(full, tensors)
    except AttributeError as error:
        raise _damage_error(checkpoint) from error
    return full


def read_local(checkpoint: Path, state: Mapping[str, Any], name: str, local: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state[name]` of a checkpoint with its DTensors, for which each rank reads only its own shards.

    Args:
        state: content of the checkpoint's file; `check_shards` should have been called.
        local: the same part of this run's state, whose DTensors are overwritten in place.
    Raises:
        CheckpointError: its tensors do not match those of `local`, or a file cannot be read.
    """
    metadata = _metadata(checkpoint, state["shards"])
    tensors = _split({name: local})[1]
    stored = {key: entry for key, entry in metadata.state_dict_metadata.items() if key.startswith(f"{name}/")}
    unmatched = sorted(stored.keys() ^ tensors.keys())
    if unmatched:
        lacking = "this run's model" if unmatched[0] in stored else "it"
        raise CheckpointError(
            f"{checkpoint}: {len(unmatched)} entries do not fit, such as {unmatched[0]}, which {lacking} lacks."
        )
    for key, tensor in tensors.items():
        entry = stored[key]
        if (entry.size, entry.properties.dtype) != (tensor.size(), tensor.dtype):
            raise CheckpointError(
                f"{checkpoint}: {key} is {tuple(entry.size)} of {entry.properties.dtype} in it, and "
                f"{tuple(tensor.shape)} of {tensor.dtype} here."
            )
    _fill(checkpoint, state["shards"], metadata, tensors)
    merged = {name: state[name]}
    _insert(merged, tensors)
    return merged[name]


def _describe(metadata: Metadata) -> dict[str, Any]:
    """Return where each chunk of each tensor is stored, as plain values."""
    tensors = {}
    for key, tensor in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in tensor.chunks:
            stored = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            chunks.append([[*chunk.offsets], [*chunk.sizes], stored.relative_path, stored.offset, stored.length])
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": [*tensor.size], "chunks": chunks}
    return tensors


class _StoredChunk(NamedTuple):
    """The location of a stored chunk of a tensor, for dcp's reader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def _metadata(checkpoint: Path, shards: Mapping[str, Any]) -> Metadata:
    """Return the metadata that was passed to `_describe`; raise a CheckpointError if the description is incomplete."""
    # dcp's own description of the folder, a pickle, is never opened: it could run code, and torch 2.6 cannot read what
    # torch 2.15 writes there.
    tensors, storage = {}, {}
    try:
        for key, tensor in shards["tensors"].items():
            chunks = []
            for offsets, sizes, file, start, length in tensor["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                storage[MetadataIndex(key, offsets)] = _StoredChunk(Path(file).name, start, length)
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor["size"]):
                raise ValueError(f"{key} is incomplete")
            properties = TensorProperties(dtype=_dtype(tensor["dtype"]))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damage_error(checkpoint) from error
    return Metadata(tensors, storage_data=storage)


def _fill(checkpoint: Path, shards: Mapping[str, Any], metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Read full tensors, or this rank's shards of DTensors; raise a CheckpointError if a file cannot be read."""
    # Not `dcp.load`, in which each rank waits for the others.
    reader = dcp.FileSystemReader(_folder(checkpoint, shards))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, AssertionError, UnpicklingError) as error:
        raise CheckpointError(f"{checkpoint}: its shards cannot be read ({_reason(error)}).") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


def _split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Return nested dicts without their DTensors, and these DTensors by their path of keys, joined by slashes."""
    rest: dict[str, Any] = {}
    sharded: dict[str, DTensor] = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            sharded[key] = value
        elif isinstance(value, Mapping):
            others, inner = _split(value)
            rest[key] = others if inner else value
            sharded |= {f"{key}/{path}": tensor for path, tensor in inner.items()}
        else:
            rest[key] = value
    return rest, sharded


def _insert(state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put tensors back into nested dicts from which `_split` has taken them."""
    for path, tensor in tensors.items():
        *parents, last = path.split("/")
        owner = state
        for key in parents:
            owner = owner.setdefault(key, {})
        owner[last] = tensor


def _folder(checkpoint: Path, shards: Mapping[str, Any]) -> Path:
    return checkpoint.parent / Path(shards["folder"]).name


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(_reason(cause) for cause, _ in error.failures.values()))
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def _damage_error(checkpoint: Path) -> CheckpointError:
    return CheckpointError(f"{checkpoint}: damaged: its description of the shards is incomplete. Get the file again.")
