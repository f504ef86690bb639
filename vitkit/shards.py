"""Checkpoints whose divided tensors lie in a folder beside them: what can be done without reading those tensors.

The checkpoint names the folder, its files with their checksums, and what lies where in them.
"""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from vitkit.distributed import rank
from vitkit.errors import CheckpointError

SHARDS_SUFFIX = ".shards"
"""Of the folders."""


def split(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Nested dicts without their divided tensors; and those, under their keys from the top, joined by slashes."""
    rest: dict[str, Any] = {}
    divided: dict[str, DTensor] = {}
    for key, value in state.items():
        if isinstance(value, DTensor):
            divided[key] = value
        elif isinstance(value, Mapping):
            rest[key], inner = split(value)
            divided |= {f"{key}/{path}": tensor for path, tensor in inner.items()}
        else:
            rest[key] = value
    return rest, divided


def join(rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What `split` took apart."""
    state = {key: join(value, {}) if isinstance(value, Mapping) else value for key, value in rest.items()}
    for path, tensor in tensors.items():
        *parents, last = path.split("/")
        owner = state
        for key in parents:
            owner = owner.setdefault(key, {})
        owner[last] = tensor
    return state


def sync_folder(folder: Path) -> None:
    """Returns once the names in a folder are on the disk, as far as the system can tell."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def checksums_of(folder: Path) -> dict[str, list[int]]:
    """Of this rank's files: name -> bytes and checksum."""
    return {path.name: [path.stat().st_size, _checksum(path)] for path in folder.glob(f"__{rank()}_*.distcp")}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            value = zlib.crc32(block, value)
    return value


def check_shards(checkpoint: Path, described: Mapping[str, Any], *, checksums: bool) -> None:
    """
    Args:
        checkpoint: the file beside the folder.
        described: what it holds of the folder.
        checksums: compare them, too, for which all files are read.
    Raises:
        CheckpointError: files are missing or damaged; it names them.
    """
    try:
        folder = checkpoint.parent / Path(described["folder"]).name
        files = {Path(name).name: (int(size), int(checksum)) for name, (size, checksum) in described["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(checkpoint) from error
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint}: most of it is in the folder '{folder.name}', which is not beside it. Copy both together."
        )
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{checkpoint}: {len(missing)} of the {len(files)} shard files in '{folder}' are missing "
            f"({', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}). Each holds a part of every weight: copy "
            "the whole folder again, or take another checkpoint."
        )
    for name, (size, checksum) in files.items():
        found = (folder / name).stat().st_size
        if found != size or (checksums and _checksum(folder / name) != checksum):
            reason = f"it has {found} bytes of {size}" if found != size else "its checksum is wrong"
            raise CheckpointError(f"{folder / name}: truncated or damaged ({reason}). Get the file again.")


def damaged(checkpoint: Path) -> CheckpointError:
    return CheckpointError(f"{checkpoint}: damaged: what it says of its shards is incomplete. Get the file again.")
