"""Locates what a name of weights or of a model refers to, by one table of precedence."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Literal

from vitkit import model_zoo
from vitkit.config.names import CONFIG_SUFFIXES, check_unambiguous, find_config, has_arguments
from vitkit.errors import ConfigError
from vitkit.registry import unknown
from vitkit.weights.download import fetch_file
from vitkit.weights.hub import fetch_repository, is_hub_name
from vitkit.weights.published import fetch_published
from vitkit.weights.reading import check_not_shards, read_metadata
from vitkit.weights.transformers_folder import INDEX_SUFFIX, is_transformers_folder

RUN_CONFIG, BEST_NAME, LAST_NAME = "config.json", "best.pth", "last.pth"
"""File names in a run's folder."""
RUN_WEIGHTS = (BEST_NAME, LAST_NAME)
"""The weights of a run; the first that exist are loaded."""
BACKBONE_WEIGHTS = "backbone.pth"
"""File name of the weights that a run learns without labels, under the backbone's own names."""
WEIGHTS_SUFFIXES = (".pth", ".pt", ".pkl", ".npz", ".bin", ".safetensors")
"""A path with one of these endings is taken for weights, even if the file does not exist."""
EXPORTED_SUFFIXES = (".onnx", ".pt2")
"""Likewise for exported files."""
TIMM, URLS, CHECKSUM = "timm/", ("http://", "https://", "file://"), "#sha256="

Kind = Literal["timm", "url", "hub", "library", "run", "config", "exported", "checkpoint", "published"]
"""What a name refers to: "hub" is a repository and "library" a folder of the transformers library, "run" any other
folder, "published" a name of the model zoo."""

_TABLE: tuple[tuple[Kind, Callable[[str], bool]], ...] = (
    ("timm", lambda name: name.startswith(TIMM)),
    ("url", lambda name: name.startswith(URLS)),
    ("hub", is_hub_name),
    ("library", lambda name: isdir(Path(name)) and is_transformers_folder(Path(name))),
    ("run", lambda name: isdir(Path(name))),
    ("checkpoint", lambda name: name.endswith(INDEX_SUFFIX)),
    ("config", lambda name: Path(name).suffix in CONFIG_SUFFIXES or has_arguments(name)),
    ("exported", lambda name: Path(name).suffix in EXPORTED_SUFFIXES),
    ("checkpoint", lambda name: name.endswith(WEIGHTS_SUFFIXES) and not name.startswith(URLS)),
    ("checkpoint", isfile),
    ("published", lambda name: model_zoo.listed_name(name) is not None),
    ("config", lambda name: find_config(name) is not None),
)
"""Kinds and what tells them, in order of precedence: what is there goes before names, and paths that say what they are
before others."""

PRETRAINED_KINDS: tuple[Kind, ...] = ("timm", "url", "hub", "library", "run", "checkpoint")
"""What a backbone's `pretrained` may name."""
WEIGHTS_KINDS: tuple[Kind, ...] = ("hub", "library", "run", "checkpoint", "published")
"""What the weights of a whole model may be."""
USABLE_KINDS: tuple[Kind, ...] = (*WEIGHTS_KINDS, "exported")
"""What a model is used with: weights, or an exported file."""
MODEL_KINDS: tuple[Kind, ...] = (*USABLE_KINDS, "config")
"""What the name of a model may refer to."""
FILE_KINDS: tuple[Kind, ...] = ("checkpoint", "exported")
"""Kinds that are one file, which also has the config."""

METADATA_READERS: dict[Kind, Callable[[Path], dict[str, Any]]] = {}
"""Kind -> what reads its metadata, for kinds other than checkpoints: apps/export_reading adds that of its files."""


@dataclass
class Located:
    """The weights, config or exported file that a name refers to, downloaded and read once, when first needed.

    As a path or a text it is its file or folder, or its name in the model zoo if that is to be downloaded.
    """

    kind: Kind
    name: str
    """The path or name as it was given; for published weights, their name in the model zoo's index."""
    _path: Path | None = field(default=None, repr=False)
    _metadata: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def path(self) -> Path:
        """The file or the folder of the weights, see `fetch`."""
        return self.fetch()

    def fetch(self, check: Callable[[Path], Any] = lambda config: None) -> Path:
        """Return the file or the folder of the weights on this machine.

        Args:
            check: called with a repository's `config.json` before its weights are downloaded.
        Raises:
            ConfigError: the folder is not that of a run.
            CheckpointError: the weights cannot be downloaded, or those in the package are damaged.
        """
        if self._path is None:
            if self.kind == "hub":
                self._path = fetch_repository(self.name, check)
            elif self.kind == "run":
                self._path = find_run_weights(Path(self.name))
            elif self.kind == "published":
                self._path = fetch_published(self.name)
            elif self.kind == "url":
                url, _, checksum = self.name.partition(CHECKSUM)
                self._path = fetch_file(url, checksum=f"sha256:{checksum}" if checksum else "")
            else:
                self._path = Path(self.name)
        return self._path

    @property
    def metadata(self) -> dict[str, Any]:
        """The contents of the file besides the weights, such as config and classes; empty for published files that
        are to be downloaded, which hold weights only.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        if self._metadata is None:
            self._metadata = {} if self.is_remote else METADATA_READERS.get(self.kind, read_metadata)(self.path)
        return self._metadata

    @property
    def zoo_name(self) -> str | None:
        """The weights' name in the model zoo's index, also of a published file by its own name; None if not listed."""
        return self.name if self.kind == "published" else model_zoo.find_by_file(self.name)

    @property
    def is_remote(self) -> bool:
        """Whether these are weights of the model zoo that are not in the package."""
        return self.kind == "published" and not model_zoo.is_packaged(self.name)

    def __fspath__(self) -> str:
        return self.name if self.is_remote else str(self.path)

    def __str__(self) -> str:
        return self.__fspath__()


Weights = str | Path | Located
"""A name of weights, or what it refers to."""


def locate(name: str | Path, kinds: Collection[Kind]) -> Located | None:
    """Locate what a name refers to: the first row of the table that it fits; None if it fits no row.

    Args:
        kinds: the kinds that are asked for; rows of others are passed over.
    Raises:
        ConfigError: it is not a name; or it is the name of an installed config, and also a file or folder.
    """
    if not isinstance(name, str | Path):
        raise ConfigError(f"got {type(name).__name__} for a model or weights; expected a name, a path or a config.")
    if "published" in kinds:
        check_unambiguous(name)
    text = str(name)
    kind = next((kind for kind, fits in _TABLE if kind in kinds and fits(text)), None)
    if kind is None:
        return None
    return Located(kind, (model_zoo.listed_name(text) or text) if kind == "published" else text)


def find_weights(
    source: Weights, kinds: Collection[Kind] = WEIGHTS_KINDS, *, check: Callable[[Path], Any] = lambda config: None
) -> Located:
    """Find the weights of a model.

    Args:
        source: the folder of a run, a file of weights, a folder of the transformers library, "hf:OWNER/NAME", a
            repository of its hub, downloaded once, or a name of the model zoo, such as "shapes_dino", whose weights are
            in the package, or "detr_r50", whose weights are downloaded when they are loaded; or what one refers to.
        kinds: `WEIGHTS_KINDS`, or also others, `USABLE_KINDS`.
        check: see `Located.fetch`.
    Raises:
        ConfigError: there are no such weights, or only a config of that name; a file that is missing is only reported
            when it is loaded.
        CheckpointError: the repository cannot be downloaded.
    """
    located = source if isinstance(source, Located) else locate(source, (*kinds, "config"))
    if located is None:
        others = ["an exported file"] if "exported" in kinds else []
        raise ConfigError(nothing_named(str(source), model_zoo.index(), *others))
    if located.kind == "config":
        find_config(source)  # whose error says that there is no family of that name
        raise ConfigError(f"{source}: a config has no weights. Give a checkpoint, or the folder of a run.")
    if not located.is_remote:
        located.fetch(check)
    return located


def nothing_named(name: str, names: Collection[str], *others: str) -> str:
    """Return an error message for a name that is not one of a model; `others` are what else would be right."""
    if name.startswith((TIMM, *URLS)):
        return (
            f"{name}: weights from a URL or timm are for backbones only (model.backbone.pretrained={name}). For a "
            "whole model give a file, a run, a name of the model zoo or hf:OWNER/NAME."
        )
    library = "a model of the transformers library (its folder, or hf:OWNER/NAME)"
    expected = ", nor ".join(("a model of the zoo", "a run's folder or checkpoint", library, *others))
    return unknown(name, names, f"{name!r} is neither {expected}")


def find_run_weights(folder: Path) -> Path:
    """Return the checkpoint in a run's folder, or in one that has only the checkpoint.

    Raises:
        ConfigError: it has none.
        CheckpointError: it is that of a checkpoint's shards.
    """
    weights = [folder / name for name in RUN_WEIGHTS if (folder / name).is_file()]
    if not weights:
        check_not_shards(folder)
        runs = sorted(file.parent for file in folder.glob(f"*/{RUN_CONFIG}"))
        remedy = f" It has runs: give one, such as {runs[-1]}." if runs else ""
        raise ConfigError(
            f"'{folder}' is not the folder of a run: expected {' or '.join(RUN_WEIGHTS)}, as training writes "
            f"them.{remedy}"
        )
    return weights[0]
