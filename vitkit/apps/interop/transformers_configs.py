"""Convert the `config.json` of a folder of the transformers library to vitkit's config of the same model.

Data, losses and evaluation come from vitkit's config of the official model of the same kind.
"""

import json
from collections.abc import Mapping, Sequence
from os.path import isfile
from pathlib import Path

import torch

from vitkit.apps.interop import backbones, detectors, grounding, masks, text
from vitkit.apps.interop.transformers_settings import Kind, Section, Settings, preprocess
from vitkit.config import Config, load_config, load_saved_config
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.weights.hub import GENERATION, PREPROCESSOR
from vitkit.weights.locate import Located
from vitkit.weights.transformers_folder import (
    CONFIG,
    INDEX_SUFFIX,
    find_weights_in,
    list_files_in_index,
    read_object,
    read_stated_classes,
    read_tokens_in,
)

KINDS: Mapping[str, Kind] = {
    kind.name: kind for file in (detectors, grounding, masks, backbones, text) for kind in file.KINDS
}
"""The library's `model_type` -> the kind of model."""
_PANOPTIC_DATA = ("ade20k", "cityscapes")
"""Data sets other than COCO whose panoptic configs state which classes have instances."""
_COMPUTED = 1 << 20
"""The most values that a model may compute rather than store, such as the relative positions in a window."""


def check_architecture(path: Path) -> str:
    """Return the kind of model that a `config.json` describes.

    Raises:
        ConfigError: vitkit has no model of this kind.
        CheckpointError: the file is damaged.
    """
    values, where = read_object(path), str(path)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        architectures = ", ".join(Settings(values, where).names("architectures")) or "not stated"
        raise ConfigError(
            f"{where}: model_type {kind!r} (architectures: {architectures}) is not supported. "
            f"{nearest(str(kind), KINDS)}"
        )
    return kind


def read_config(model: Located, overrides: Sequence[str] = (), *, trust: bool = False) -> Config:
    """Return vitkit's config of a model of the library, a folder or a repository of its hub.

    Args:
        overrides, trust: see `load_saved_config`.
    Raises:
        ConfigError: see `config_of`; or vitkit has no model of the repository's kind, or an override is wrong.
        CheckpointError: the repository cannot be downloaded.
    """
    folder = model.fetch(check_architecture)
    text = json.dumps(config_of(folder, model.name if model.kind == "hub" else None))
    return load_saved_config(text, folder / CONFIG, overrides, trust=trust)


def config_of(folder: Path, name: str | None = None) -> Section:
    """Build vitkit's config, unchecked, from a folder's `config.json`.

    Args:
        name: the repository's name, whose last part may contain the task; None: the folder's name.
    Raises:
        ConfigError: a file is damaged, or vitkit does not have the architecture or a setting.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"'{folder}' has weights, but no {CONFIG}, which describes the model. Give a config as well.")
    kind = check_architecture(path)
    settings = Settings(_with_generation(folder, read_object(path)), str(path))
    # The owner and the parent folders say nothing about the task.
    last_name = name.partition("@")[0].rpartition("/")[2] if name else folder.resolve().name
    base, model = KINDS[kind].read(settings, last_name)
    if read_tokens_in(folder):  # the sizes and the mask token are those of the vocabularies
        model = {name: value for name, value in model.items() if name not in ("source_size", "target_size", "mask_id")}
    stated = read_stated_classes(path)
    things = settings.sub("vitkit").get("things")
    if things is not None and "tasks" in model:
        model["things"] = things
    elif "panoptic" in model.get("tasks", ()) and stated and stated["things"] is None:
        model |= _things_of(stated["classes"])
    config = json.loads(json.dumps(load_config(base, check=False)))
    config["model"] = model
    is_text = KINDS[kind] in text.KINDS
    _check_size(model, folder, None if is_text else stated.get("classes"))
    path = folder / PREPROCESSOR
    if path.is_file():
        preprocess(config, Settings(read_object(path), str(path)))
    return config


def _check_size(model: Section, folder: Path, classes: Sequence[str] | None) -> None:
    """Check that a model is not far larger than the weights beside its config, before it takes memory.

    Raises:
        ConfigError: it is, or a tensor cannot have one of its sizes.
    """
    path = find_weights_in(folder)
    if path is None:
        return
    files = [folder / name for name in list_files_in_index(path)] if path.name.endswith(INDEX_SUFFIX) else [path]
    available = sum(file.stat().st_size for file in files if isfile(file))
    vocabularies = {side: tokens.vocabulary for side, tokens in read_tokens_in(folder).items()}
    things = None if classes is None else [True] * len(classes)
    try:
        with torch.device("meta"):  # tensors with sizes but no values
            built = build_model(model, classes=classes, things=things, vocabularies=vocabularies)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:  # what torch raises depends on the size
        reason = str(error).splitlines()[0][:100]
        raise ConfigError(f"{folder / CONFIG}: its sizes are too large for a model ({reason}).") from error
    # A weight takes two or four bytes there.
    num_values = sum(value.numel() for value in (*built.parameters(), *built.buffers()))
    if num_values > available + _COMPUTED:
        raise ConfigError(
            f"{folder / CONFIG}: describes a model of {num_values} values, but the weights beside it have only "
            f"{available} bytes. Get both files again."
        )


def _with_generation(folder: Path, values: Section) -> Section:
    """Add the decoding settings, which newer folders have in a separate file."""
    path = folder / GENERATION
    return (read_object(path) if path.is_file() else {}) | values


def _things_of(classes: Sequence[str]) -> Section:
    """Return `things` of the data set that has these classes; empty if no data set does.

    Names are compared by first synonym, and over three quarters must agree, as repositories spell a few differently.
    """
    first_names = [name.partition(",")[0].strip() for name in classes]
    for data in _PANOPTIC_DATA:
        known = load_config(f"mask2former_r50_{data}_semantic", check=False)["data"]["val"]["classes"]
        num_same = sum(a == b for a, b in zip(first_names, known))
        if len(known) == len(classes) and num_same > 0.75 * len(known):
            config = load_config(f"mask2former_r50_{data}_panoptic", check=False)
            return dict(things=list(config["model"]["things"]))
    return {}
