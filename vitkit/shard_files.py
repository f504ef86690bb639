"""Tensors that are divided among ranks, in files of which each rank writes its own, and any number of ranks reads them.

The files are those of torch.distributed.checkpoint. What lies where in them is in the checkpoint beside their folder,
so that none of torch's pickled descriptions is ever read.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from vitkit.distributed import broadcast_object, gather_objects, is_main
from vitkit.errors import CheckpointError
from vitkit.shards import checksums_of, damaged, sync_folder


def write_shards(folder: Path, divided: Mapping[str, DTensor], *, temporary: Path) -> dict[str, Any]:
    """Every rank writes its parts. All ranks call it, with a folder that is not there yet.

    Args:
        divided: as `split` returns it.
        temporary: the folder's name until all files are on the disk.
    Returns:
        what reading them takes, as plain values, for the checkpoint.
    Raises:
        CheckpointError: on all ranks, if one of them could not write. Nothing is left then.
    """
    failed = described = None
    try:
        described = _describe(dcp.save(dict(divided), storage_writer=FileSystemWriter(temporary)))
        own = checksums_of(temporary)
    except CheckpointException as error:  # of any rank, on all of them
        failed = "; ".join(dict.fromkeys(_reason(cause) for cause, _ in error.failures.values()))
    except OSError as error:
        own = _reason(error)
    if failed is None:
        of_ranks = gather_objects(own)
        failed = next((f"rank {number}: {text}" for number, text in enumerate(of_ranks) if isinstance(text, str)), None)
        if is_main() and failed is None:
            described |= {
                "folder": folder.name,
                "files": {name: sums for own in of_ranks for name, sums in own.items()},
            }
            failed = _place(temporary, folder)
        failed = broadcast_object(failed)
    if failed is not None:
        if is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{folder}: not saved ({failed}). Checkpoints from before are intact. Make room, or check the disk."
        )
    return described


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def _place(temporary: Path, folder: Path) -> str | None:
    """Renames a folder whose files are complete; what went wrong, if anything did."""
    try:
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except OSError as error:
        return _reason(error)
    return None


def _describe(metadata: Metadata) -> dict[str, Any]:
    """What lies where, as plain values."""
    tensors = {}
    for path, known in metadata.state_dict_metadata.items():
        chunks = []
        for chunk in known.chunks:
            place = metadata.storage_data[MetadataIndex(path, chunk.offsets)]
            chunks.append([[*chunk.offsets], [*chunk.sizes], place.relative_path, place.offset, place.length])
        dtype = str(known.properties.dtype).removeprefix("torch.")
        tensors[path] = {"dtype": dtype, "size": [*known.size], "chunks": chunks}
    return {"tensors": tensors}


def read_shards(
    checkpoint: Path, described: Mapping[str, Any], tensors: Mapping[str, Tensor], *, below: str = ""
) -> None:
    """Fills tensors in place: whole ones, or those that are divided in any way. Each rank reads only its own parts.

    Args:
        checkpoint, described: see `check_shards`, which should have been called.
        tensors: path -> tensor, of all that there are below `below`.
        below: the paths' beginning.
    Raises:
        CheckpointError: there are others than these, or of other shapes or kinds; or a file cannot be read.
    """
    metadata = _metadata(checkpoint, described)
    known = {path: stored for path, stored in metadata.state_dict_metadata.items() if path.startswith(below)}
    only = sorted(known.keys() ^ tensors.keys())
    if only:
        where = "this run's model" if only[0] in known else "it"
        raise CheckpointError(f"{checkpoint}: {len(only)} entries do not fit, such as {only[0]}, which {where} lacks.")
    for path, tensor in tensors.items():
        stored = known[path]
        if (stored.size, stored.properties.dtype) != (tensor.size(), tensor.dtype):
            raise CheckpointError(
                f"{checkpoint}: {path} is {tuple(stored.size)} of {stored.properties.dtype} in it, and "
                f"{tuple(tensor.shape)} of {tensor.dtype} here."
            )
    reader = FileSystemReader(checkpoint.parent / Path(described["folder"]).name)
    # No ranks talk to each other here, so that one alone can read, too.
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    try:
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, AssertionError) as error:
        raise CheckpointError(f"{checkpoint}: its shards cannot be read ({_reason(error)}).") from error


def read_whole(checkpoint: Path, described: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors, whole, in this process: path -> tensor. See `read_shards`."""
    tensors = {
        path: torch.empty(stored.size, dtype=stored.properties.dtype)
        for path, stored in _metadata(checkpoint, described).state_dict_metadata.items()
    }
    read_shards(checkpoint, described, tensors)
    return tensors


def _metadata(checkpoint: Path, described: Mapping[str, Any]) -> Metadata:
    """What `_describe` was given."""
    tensors, places = {}, {}
    try:
        for path, known in described["tensors"].items():
            chunks = []
            for offsets, sizes, file, start, length in known["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(path, torch.Size(offsets))] = _StorageInfo(Path(file).name, start, length)
            properties = TensorProperties(dtype=_dtype(known["dtype"]))
            tensors[path] = TensorStorageMetadata(properties, torch.Size(known["size"]), chunks)
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(known["size"]):
                raise ValueError(path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(checkpoint) from error
    return Metadata(tensors, storage_data=places)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(name)
    return dtype
