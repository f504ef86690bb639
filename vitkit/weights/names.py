"""Find the file or the folder of weights that a name refers to: a file, a run's folder, the model zoo, the hub."""

from os.path import exists, isdir, isfile
from pathlib import Path
from typing import NamedTuple

from vitkit import model_zoo
from vitkit.config.names import CONFIG_SUFFIXES, check_unambiguous, find_config
from vitkit.errors import ConfigError
from vitkit.registry import unknown
from vitkit.weights.hub import fetch_repository, is_hub_name
from vitkit.weights.published import published_weights
from vitkit.weights.transformers_folder import is_transformers_folder

RUN_CONFIG, RUN_WEIGHTS = "config.json", ("best.pth", "last.pth")
"""File names in a run's folder; the first weights that exist are loaded."""
BACKBONE_WEIGHTS = "backbone.pth"
"""File name of the weights that a run learns without labels, under the backbone's own names."""
WEIGHTS_SUFFIXES = (".pth", ".pt", ".pkl", ".npz", ".bin", ".safetensors")
"""A path with one of these endings is taken for weights, even if the file does not exist."""


class LocalWeights(NamedTuple):
    """Weights on this machine."""

    path: str | Path
    """A file, or a folder of the transformers library; it may not exist."""
    zoo_name: str | None
    """Their name in the model zoo's index, if they are listed there."""


def fetch_weights(source: str | Path) -> LocalWeights:
    """Return the local copy of weights, which is downloaded the first time.

    Args:
        source: a path, a name in the model zoo's index, or "hf:OWNER/NAME".
    Raises:
        CheckpointError: they cannot be downloaded.
    """
    if is_hub_name(source):
        return LocalWeights(fetch_repository(source), None)
    listed = None if not isinstance(source, str) or exists(source) else model_zoo.listed_name(source)
    if listed is not None:
        return LocalWeights(published_weights(listed), listed)
    return LocalWeights(source, model_zoo.published_name(source))


def find_weights(source: str | Path) -> str | Path:
    """Find the weights of a model, for `load_weights`: a checkpoint's path, or a name of the model zoo.

    Args:
        source: one of the following, tried in this order:
            a file of weights;
            a folder of the transformers library, or "hf:OWNER/NAME", a repository of its hub, downloaded once;
            the folder of a run;
            a name of the model zoo, such as "shapes_dino", whose weights are in the package, or "detr_r50", whose
            weights are downloaded when they are loaded.
    Raises:
        ConfigError: there are no such weights, or only a config of that name.
        CheckpointError: the repository cannot be downloaded.
    """
    check_unambiguous(source)
    path, name = Path(source), str(source)
    if path.suffix in WEIGHTS_SUFFIXES or (isfile(path) and path.suffix not in CONFIG_SUFFIXES):
        return source
    if is_hub_name(source):
        return fetch_repository(source)
    if isdir(path):
        return path if is_transformers_folder(path) else run_weights(path)
    if listed := model_zoo.listed_name(name):
        return packaged_or_name(listed)
    if path.suffix in CONFIG_SUFFIXES or find_config(name) is not None:
        raise ConfigError(f"{name}: a config has no weights. Give a checkpoint, or the folder of a run.")
    message = f"{name!r} is neither a model of the zoo, nor a run's folder or checkpoint"
    raise ConfigError(unknown(name, model_zoo.index(), message))


def packaged_or_name(weights: str | Path) -> str | Path:
    """Return the file of a name of the model zoo if it is in the package, as it also has classes and vocabularies;
    other weights are returned as they are."""
    return published_weights(str(weights)) if model_zoo.is_packaged(str(weights)) else weights


def backbone_weights(folder: Path) -> Path:
    """Return the backbone that a run in a folder has learned without labels, for other models.

    Raises:
        ConfigError: there is none.
    """
    path = folder / BACKBONE_WEIGHTS
    if not path.is_file():
        raise ConfigError(
            f"'{folder}' is not the folder of a pretraining run: expected {BACKBONE_WEIGHTS}, as vitkit pretrain "
            "writes it. Of another model's run, give its checkpoint to --init or --init-partial."
        )
    return path


def run_weights(folder: Path) -> Path:
    """Return the checkpoint in a run's folder.

    Raises:
        ConfigError: it is not the folder of a run.
        CheckpointError: it is that of a checkpoint's shards.
    """
    weights = [folder / name for name in RUN_WEIGHTS if (folder / name).is_file()]
    if not weights or not (folder / RUN_CONFIG).is_file():
        from vitkit.weights.reading import check_not_shards  # imports PyTorch

        check_not_shards(folder)
        raise ConfigError(
            f"'{folder}' is not the folder of a run: expected {RUN_CONFIG} and {' or '.join(RUN_WEIGHTS)}, as training "
            "writes them."
        )
    return weights[0]
