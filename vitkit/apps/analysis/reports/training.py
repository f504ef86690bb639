"""The MACs of a whole training."""

from dataclasses import dataclass

from vitkit.apps.analysis.reports.subject import Subject
from vitkit.data.loading.settings import DataSettings
from vitkit.errors import ConfigError, DataError
from vitkit.protocols.dataset import Dataset


@dataclass(frozen=True)
class TrainingMacs:
    """The MACs of a whole training, in which a backward pass costs as much as two forward passes."""

    forward: int
    """MACs of a forward pass of one image or text."""
    samples: int
    """Images or texts of an epoch."""
    epochs: int
    macs: int
    """Of the whole training."""
    length: int | None = None
    """The length of a text in tokens; None for images."""


def epochs_of(subject: Subject) -> int:
    """Return the epochs of the training that a config describes.

    Raises:
        ConfigError: it has none, or the model is a backbone.
    """
    epochs = (subject.config.get("train") or {}).get("epochs")
    if epochs is None:
        raise ConfigError(f"--training-macs: {subject.name} has no train.epochs. Analyze a config that sets it.")
    return epochs


def training_macs_of(subject: Subject, forward: int, samples: int, *, length: int | None = None) -> TrainingMacs:
    """Return the MACs of the training that a config describes; see `TrainingMacs`, and `epochs_of` for errors."""
    epochs = epochs_of(subject)
    return TrainingMacs(forward, samples, epochs, 3 * forward * samples * epochs, length)


def training_dataset(subject: Subject) -> Dataset:
    """Build the training data of a config.

    Raises:
        ConfigError: the config has none; the message says how a number is given instead.
        DataError: it cannot be read; likewise.
    """
    remedy = "Give the images or texts of an epoch: --samples N."
    data = DataSettings(**subject.config.get("data") or {})
    if data.train is None:
        raise ConfigError(f"--training-macs: {subject.name} has no data.train. {remedy}")
    try:
        return data.dataset("train")
    except (ConfigError, DataError) as error:
        raise type(error)(f"--training-macs: {error} {remedy}") from error
