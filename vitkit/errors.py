"""The errors a user can cause. Each message names the thing, what was got, what was expected, and the remedy."""

import os
import re
import sysconfig
import traceback

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


def place_in_own_code(error: BaseException) -> str | None:
    """Return "FILE, line N", the last line of a user's file on the way to an error; None if there is none."""
    packages = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    folder = os.path.dirname(__file__)
    # In a checkout, the tools, configs and model zoo stand beside the package.
    packages += [folder, *(os.path.join(os.path.dirname(folder), name) for name in ("tools", "configs", "model_zoo"))]
    place: str | None = None
    cause: BaseException | None = error
    while cause is not None and place is None:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(cause.__traceback__)]
        # torch.export gives the lines of the code that it traced in its message.
        frames += [(file, line) for file, line in re.findall(r'File "([^"]+\.py)", line (\d+)', str(cause))]
        own = [frame for frame in frames if frame[0].endswith(".py") and not frame[0].startswith(tuple(packages))]
        place = f"{own[-1][0]}, line {own[-1][1]}" if own else None
        cause = cause.__cause__ or cause.__context__
    return place


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
