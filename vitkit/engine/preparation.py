"""Preparations of a model between its construction and its training, such as adding a teacher."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkit.data.loading.settings import DataSettings
from vitkit.engine.settings import TrainSettings
from vitkit.protocols.dataset import Dataset, Loader
from vitkit.protocols.model import Model


@dataclass(kw_only=True)
class Start:
    """The data, settings and checkpoint that a run starts from."""

    config: dict[str, Any]
    data: DataSettings
    settings: TrainSettings
    datasets: Mapping[str, Dataset]
    """The training and the validation data, as "train" and "val"."""
    loader: Loader
    device: torch.device
    checkpoint: Path | None
    """The checkpoint that the run is resumed from; None: it is new."""


class Preparation:
    """Base of preparations of a model; one is built with the constructed model, before weights are loaded.

    All ranks call each method, in this order: `begin`, only of a new run, then `finish`.
    """

    about: Mapping[str, Any] = {}
    """What checkpoints say about it."""

    def __init__(self, model: Model, start: Start):
        self.start = start

    @classmethod
    def is_needed(cls, model: Model, start: Start) -> bool:
        """Return whether a run has this preparation."""
        raise NotImplementedError

    def begin(self, model: Model) -> None:
        """Prepare a model on the run's device that has the weights which a new run starts from."""

    def finish(self, model: nn.Module) -> None:
        """Prepare the model for the optimizer, which gets its parameters next; those of a resumed run are loaded
        later."""


class StoredFeatures(Preparation):
    """The features of a frozen network, computed once; see `vitkit.engine.feature_cache`."""

    @classmethod
    def is_needed(cls, model: Model, start: Start) -> bool:
        """Return whether the run's data have a folder for features."""
        return start.data.cache_features is not None

    def begin(self, model: Model) -> None:
        """Make the run's datasets read features, also when it is resumed."""
        from vitkit.engine.feature_cache import cache_features  # few runs store features

        for split, path in cache_features(model, self.start.datasets, self.start.data, self.start.device).items():
            self.start.config["data"][split]["features"] = path
