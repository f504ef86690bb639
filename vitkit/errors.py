"""The errors a user can cause. Each message names the thing, what was got, what was expected, and the remedy."""

import os

from vitkit.text_format import printable, shorten


class VitkitError(ValueError):
    """Base of all errors that a user's input can cause; tools print its message without a stack trace.

    A message quotes what was got, so it is shortened where that is long.
    """

    def __str__(self) -> str:
        return printable(shorten(super().__str__()))


def error_line(error: Exception) -> str:
    """Return the line with which tools report an error; under torchrun it names the rank, as ranks may differ."""
    where = f" (rank {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
    return f"error{where}: {error}"


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that this machine ran out of memory, for data or while it loaded a library."""
    # PyTorch's CPU allocator and its memory maps raise a RuntimeError, processes that cannot be forked an OSError, and
    # libraries that cannot be loaded an ImportError. If Python itself fails while it loads a module, it says only that
    # there is no exception; oneDNN says only that it could not create a primitive.
    texts = ("allocate memory", "failed to map segment", "without exception set", "without setting an exception")
    is_text = isinstance(error, RuntimeError | OSError | ImportError | SystemError)
    text = str(error)
    return isinstance(error, MemoryError) or (
        is_text and (any(known in text for known in texts) or text == "could not create a primitive")
    )


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
        # It quotes names from users' files, and must stay one line.
        return super().__str__().replace("\n", "\\n").replace("\t", "\\t")


class LossyImageError(DataError):
    """A label image is stored in a form that changes its values."""


class CheckpointError(VitkitError):
    """A checkpoint is missing, damaged, unsafe, or made for another model."""


class TrainingError(VitkitError):
    """Training cannot go on, such as after a loss that is not finite."""
