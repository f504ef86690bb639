"""The errors a user can cause. Each message names the thing, what was got, what was expected, and the remedy."""

import os

from vitkit.words import printable


class VitkitError(ValueError):
    """Base of all errors that a user's input can cause; tools print its message without a stack trace."""

    def __str__(self) -> str:
        return printable(super().__str__())


def error_line(error: Exception) -> str:
    """Return the line with which tools report an error; under torchrun it names the rank, as ranks may differ."""
    where = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
    return f"error{where}: {error}"


class ConfigError(VitkitError):
    """A config file, an override or a constructor's argument is wrong."""

    path: str = ""
    """The config key of the object whose constructor raised the error; empty outside of a build."""

    def add_key(self, key: str) -> None:
        """Put a config key in front of the path, on the way out through the builds that enclose the constructor."""
        self.path = f"{key}.{self.path}" if self.path else key

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.path}: {message}" if self.path else message


class DataError(VitkitError):
    """A dataset's folder, annotation file or image is missing or wrong."""

    def __str__(self) -> str:
        # It quotes names that strangers chose, and stays one line.
        return super().__str__().replace("\n", "\\n").replace("\t", "\\t")


class CheckpointError(VitkitError):
    """A checkpoint is missing, damaged, unsafe, or made for another model."""


class TrainingError(VitkitError):
    """Training cannot go on, such as after a loss that is not finite."""
