"""Where the pretrained weights that a backbone names come from: a file, a run, a URL, the hub, timm."""

from collections.abc import Mapping
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.errors import CheckpointError, ConfigError
from vitkit.registry import nearest
from vitkit.weights.download import fetch_file
from vitkit.weights.hub import fetch_repository, is_hub_name
from vitkit.weights.names import backbone_weights
from vitkit.weights.transformers_folder import is_transformers_folder

RANDOM_INSTEAD = ", or start from random weights (model.backbone.pretrained=False)"
"""The last remedy in errors about missing weights."""


def find_source(source: str) -> Path | Mapping[str, Any]:
    """Return the file, folder or state dict that a value of `pretrained` refers to, downloaded the first time.

    Raises:
        CheckpointError: there is none, or it cannot be downloaded.
    """
    if source.startswith("timm/"):
        return _timm_weights(source.removeprefix("timm/"))
    if source.startswith(("http://", "https://", "file://")):
        url, _, checksum = source.partition("#sha256=")
        try:
            return fetch_file(url, checksum=f"sha256:{checksum}" if checksum else "")
        except CheckpointError as error:
            raise CheckpointError(
                f"pretrained: the weights are missing: {error} Or give a file (model.backbone.pretrained=FILE)"
                f"{RANDOM_INSTEAD}."
            ) from error
    if is_hub_name(source):
        return fetch_repository(source)
    if isdir(source) and not is_transformers_folder(Path(source)):
        try:
            return backbone_weights(Path(source))
        except ConfigError as error:
            raise CheckpointError(f"pretrained: {error}") from error
    if not isfile(source) and not is_transformers_folder(Path(source)):
        raise CheckpointError(
            f"pretrained: no file {source!r}. Give a file of weights, the folder of a pretraining run, a URL "
            f"('https://...#sha256=PREFIX'), the name of timm's weights ('timm/NAME'){RANDOM_INSTEAD}."
        )
    return Path(source)


def _timm_weights(name: str) -> dict[str, Tensor]:
    import timm

    if not timm.is_model_pretrained(name):
        raise CheckpointError(
            f"pretrained: timm {timm.__version__} has no weights named {name!r}. "
            f"{nearest(name, timm.list_pretrained())}"
        )
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # whatever the hub and its libraries raise when they cannot be reached
        raise CheckpointError(
            f"pretrained: timm's weights {name!r} cannot be downloaded ({str(error).splitlines()[0]}). Give a file "
            f"(model.backbone.pretrained=FILE){RANDOM_INSTEAD}."
        ) from error
