"""Checkpoints of LoRA, which leave out the frozen weights: they name the base that has these, and its checksum."""

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, ConfigError
from vitkit.ops.low_rank import JOINT_WEIGHT, WEIGHT, low_rank_update
from vitkit.weights.contents import LORA, state_dict_of
from vitkit.weights.download import file_digest
from vitkit.weights.names import RUN_CONFIG, fetch_weights
from vitkit.weights.published import model_zoo
from vitkit.weights.sources import find_source
from vitkit.weights.transformers_folder import INDEX_SUFFIX, MODEL_ENTRIES, find_weights_in, list_files_in_index

_PAIR = re.compile(r"(.+)\.lora\.(\w+)\.([ab])")
"""Entries of the matrices A and B: layer, part, matrix."""

BESIDE = "base.pth"
"""A name under which the base may lie beside a checkpoint, as its own may be that of the checkpoint: best.pth."""
Base = Mapping[str, str]
"""What a checkpoint says about its base: `source`, `part` ("backbone", or "" for the whole model) and `sha256`."""


def describe_base(source: str | Path, part: str) -> Base:
    """Return what checkpoints say about the weights that a run starts from.

    Args:
        source: see `fetch_weights`; for the backbone, see `find_source`.
        part: "backbone" for what its `pretrained` names, or "" for weights of the whole model.
    """
    zoo = model_zoo()
    packaged = {Path(entry["url"]).name: name for name, entry in zoo.index().items() if zoo.is_packaged(name)}
    if os.path.exists(source):  # a packaged file is elsewhere on another machine
        source = packaged.get(Path(source).name, os.path.abspath(source))
    return {"source": str(source), "part": part, "sha256": _digest(_find(str(source), part))}


def keep_base(base: Base, folder: Path) -> None:
    """Give a base that is a file of another run a second name in a run's folder, as that run replaces its files when it
    goes on; a hard link takes no space."""
    found = _find(base["source"], base["part"]) if os.path.exists(base["source"]) else None
    if isinstance(found, Path) and (found.parent / RUN_CONFIG).is_file():
        with suppress(OSError):  # on another disk, or there already
            os.link(found, folder / BESIDE)


def find_base(base: Base, name: str) -> Path | Mapping[str, Any]:
    """Return the weights that a checkpoint was trained on: a file, a folder, or a state dict.

    Args:
        name: the checkpoint; weights that are no longer at their path, or differ there, are also looked for beside it.
    Raises:
        CheckpointError: they are missing, or differ from those of the training.
    """
    source, part, expected = base["source"], base["part"], base["sha256"]
    beside = [Path(name).with_name(file) for file in (Path(source).name, BESIDE)]

    def find_beside() -> Path | None:
        return next((path for path in beside if path.is_file() and file_digest(path, "sha256") == expected), None)

    if not os.path.exists(source) and (path := find_beside()):
        return path
    try:
        found = _find(source, part)
        digest = _digest(found)
    except (CheckpointError, ConfigError, OSError) as error:
        raise CheckpointError(
            f"{name}: has only what LoRA trained, and the weights that it was trained on, {source}, cannot be read "
            f"({error}). Put them there, or beside the checkpoint as {BESIDE}."
        ) from error
    if digest == expected:
        return found
    if path := find_beside():
        return path
    raise CheckpointError(
        f"{name}: was trained with LoRA on other weights than those of {source} now (sha256 {expected[:16]}… in the "
        f"training, {digest[:16]}… now). Put the original file there, or beside the checkpoint as {BESIDE}."
    )


def merge(base: Mapping[str, Tensor], checkpoint: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a checkpoint with all of its model's weights, into which the low-rank updates are merged.

    Args:
        base: the state dict of the model, with the weights that the checkpoint was trained on.
        checkpoint: see `vitkit.nn.lora`.
        name: its name, for errors.
    Raises:
        CheckpointError: an update does not fit the model's layer.
    """
    state = state_dict_of({key: value for key, value in checkpoint.items() if key != LORA}, name)
    pairs: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key in list(state):
        if match := _PAIR.fullmatch(key):
            layer, part, matrix = match.groups()
            pairs.setdefault(layer, {}).setdefault(part, {})[matrix] = state.pop(key)
    state = {**base, **state}
    scale = checkpoint[LORA]["alpha"] / checkpoint[LORA]["rank"]
    for layer, parts in pairs.items():
        key = next((key for name in (WEIGHT, JOINT_WEIGHT) if (key := f"{layer}.{name}") in state), "")
        weight = state.get(key)
        update = scale * low_rank_update({part: (pair["a"], pair["b"]) for part, pair in parts.items()})
        if weight is None or (len(weight), weight[0].numel()) != update.shape:
            shape = "no such layer" if weight is None else f"weights {tuple(weight.shape)}"
            raise CheckpointError(
                f"{name}: updates {layer} by {tuple(update.shape)}, but the model has {shape} there. Use the config "
                "that it was trained with."
            )
        state[key] = weight + update.view_as(weight).to(weight)
    return {"model": state, **{key: checkpoint[key] for key in MODEL_ENTRIES if key in checkpoint}}


def _find(source: str, part: str) -> Path | Mapping[str, Any]:
    return find_source(source) if part else Path(fetch_weights(source).path)


def _digest(found: Path | Mapping[str, Any]) -> str:
    """Return the SHA-256 of a file, of a folder's files of weights, or of a state dict."""
    if isinstance(found, Mapping):
        digest = hashlib.sha256()
        for name, value in sorted(found.items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
    path = found if found.is_file() else find_weights_in(found) or found
    if not path.name.endswith(INDEX_SUFFIX):
        return file_digest(path, "sha256")
    digests = [file_digest(path.parent / file, "sha256") for file in list_files_in_index(path)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
