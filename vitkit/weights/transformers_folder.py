"""Weights in files of the transformers library: safetensors, several files with an index, and folders of them.

A folder has `config.json`, which describes the model, and one of the files in `WEIGHTS`.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.coco_classes import COCO_CLASSES, COCO_PANOPTIC_CLASSES
from vitkit.weights import marian, tokenizer_files
from vitkit.weights.marian import Tokens

CONFIG = "config.json"
METADATA = "vitkit"
"""Key in the header of a .safetensors file of the entries, as JSON, that a checkpoint has besides the weights."""
MODEL_ENTRIES = ("config", "classes", "category_ids", "things", "keypoints", "vocabularies", "measured")
"""Entries of a checkpoint that its model needs in addition to the weights."""
INDEX_SUFFIX = ".index.json"
WEIGHTS = (
    "model.safetensors",
    f"model.safetensors{INDEX_SUFFIX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX_SUFFIX}",
)
"""Names of weights files; the first one that exists is read."""

_CLASSIFYING = r"For\w*(Classification|Detection|Segmentation)$"
"""Pattern of the library's architectures with classes."""
_NUM_RAW_IDS, _NUM_PANOPTIC_IDS = 91, 250
"""Numbers of classes of detectors that have one for each of COCO's raw category ids."""


def find_weights_in(folder: Path) -> Path | None:
    """Return the file or the index of a folder's weights, or None if it is not such a folder."""
    return next((folder / name for name in WEIGHTS if isfile(folder / name)), None)


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder has the layout of the transformers library, unlike a run's folder."""
    path, has_weights = folder / CONFIG, find_weights_in(folder) is not None
    if not isfile(path):
        return has_weights
    try:
        return "model_type" in read_object(path)
    except CheckpointError:  # the file is damaged, which does not tell its kind
        return has_weights


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Raises:
        CheckpointError: it cannot be read, or contains something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Get the file again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: contains a {type(values).__name__}; expected a JSON object.")
    return values


def add_metadata(folder: Path, state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the weights of a folder as a checkpoint, with the classes stated in its `config.json`, or with its
    vocabularies, in whose order rows of tokens then are.

    Raises:
        CheckpointError: a file is damaged.
    """
    tokens = read_tokens_in(folder)
    if "source" in tokens:
        state = marian.renumber(state, tokens)
    elif tokens and read_object(folder / CONFIG)["model_type"] in tokenizer_files.LANGUAGE_MODELS:
        state = tokenizer_files.renumber(state, tokens["target"].vocabulary)
    return {"model": state, **_metadata(folder, tokens)}


def read_folder_metadata(folder: Path) -> dict[str, Any]:
    """Return what `add_metadata` adds to the weights.

    Raises:
        CheckpointError: a file is damaged.
    """
    return _metadata(folder, read_tokens_in(folder))


def read_tokens_in(folder: Path) -> dict[str, Tokens]:
    """Return a translation model's tokens, "source" and "target", or those that a language model or a text-prompted
    detector reads, "target"; an empty dict for other folders."""
    if not (folder / CONFIG).is_file():
        return {}
    config = read_object(folder / CONFIG)
    if config.get("model_type") in tokenizer_files.KINDS:
        return tokenizer_files.read_tokens(folder, config)
    return marian.read_tokens(folder, config, read_object)


def _metadata(folder: Path, tokens: Mapping[str, Tokens]) -> dict[str, Any]:
    if tokens:
        return {"vocabularies": {side: tokens[side].vocabulary.to_json() for side in tokens}}
    return read_stated_classes(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def list_files_in_index(index: Path) -> list[str]:
    """Return the names of the files that an index lists, sorted.

    Raises:
        CheckpointError: the index is damaged, or lists a file in another folder.
    """
    files = set(map(str, read_weight_map(index).values()))
    elsewhere = [name for name in files if Path(name).name != name]
    if elsewhere:
        raise CheckpointError(f"{index}: names {elsewhere[0]!r}; expected files beside it.")
    return sorted(files)


def read_weight_map(index: Path) -> Mapping[str, Any]:
    """Return tensor name -> name of the file that contains it."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, Mapping) or not files:
        raise CheckpointError(f"{index}: has no weight_map, which says which file contains which tensor. Get it again.")
    return files


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a .safetensors file.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return load_file(path)
    except Exception as error:  # the package's errors are of a type of its own
        raise _damage_error(path, error) from error


def read_safetensors_entries(path: Path) -> dict[str, Any]:
    """Return `MODEL_ENTRIES` that vitkit wrote to a .safetensors file; {} for files of other projects.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            entries = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except Exception as error:  # the package's errors are of a type of its own
        raise _damage_error(path, error) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: {METADATA!r} in its header is not a JSON object. Get the file again.")
    return {key: entries[key] for key in MODEL_ENTRIES if key in entries}


def _damage_error(path: Path, error: Exception) -> CheckpointError:
    reason = (str(error) or repr(error)).splitlines()[0]
    return CheckpointError(f"{path}: truncated, damaged or not in safetensors format ({reason}). Get the file again.")


def read_stated_classes(config: Path) -> dict[str, Any]:
    """Return "classes" and, if known, "things" from a folder's `config.json`, in the form that checkpoints have.

    A file that names none has the library's default of two if its model has classes; otherwise the result is {}. COCO
    detectors have a class for each raw id, many without a name: they are mapped to COCO's 80 or 133 classes.

    Raises:
        CheckpointError: the file is damaged.
    """
    values = read_object(config)
    labels = values.get("id2label")
    if not labels:
        # The library leaves its default out when it saves a config.
        architectures = values.get("architectures")
        has_classes = isinstance(architectures, list) and any(re.search(_CLASSIFYING, str(x)) for x in architectures)
        return {"classes": ["LABEL_0", "LABEL_1"], "things": None} if has_classes else {}
    try:
        names: Sequence[str] = [str(labels[key]) for key in sorted(labels, key=int)]
    except (TypeError, ValueError, LookupError) as error:
        raise CheckpointError(f"{config}: id2label does not map numbers to names ({error}).") from error
    unnamed = all(re.fullmatch(r"LABEL_\d+|N/A", name) for name in names)
    if len(names) == _NUM_RAW_IDS and (unnamed or [name for name in names if name != "N/A"] == list(COCO_CLASSES)):
        names = COCO_CLASSES
    elif len(names) == _NUM_PANOPTIC_IDS and (unnamed or set(COCO_CLASSES) <= set(names)):
        names = COCO_PANOPTIC_CLASSES
    else:
        counts = Counter(names)
        names = [f"{name} ({i})" if counts[name] > 1 else name for i, name in enumerate(names)]
    is_panoptic = list(names) == list(COCO_PANOPTIC_CLASSES)
    return {"classes": list(names), "things": [name in COCO_CLASSES for name in names] if is_panoptic else None}
