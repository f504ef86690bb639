"""Shared parts of the tools: the --device option, errors in one line, models and overrides among the arguments.

PyTorch is imported by the functions that need it, so that `--help` of a tool need not wait for it.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING

from vitkit.apps.export_reading.settings import RUNTIMES
from vitkit.apps.export_writing.own_code import place_in_own_code
from vitkit.errors import ConfigError, VitkitError, error_line
from vitkit.text_format import printable, shorten
from vitkit.tools.console import printing

if TYPE_CHECKING:
    from vitkit.apps.inference import Loaded, Tiling


def add_device(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """Add --device: "cpu", or an accelerator that PyTorch finds, which is then the default."""
    # argparse also passes a default that is a text through `_device`, but only if it does not print --help.
    text = f"cpu, cuda, mps, ... (default: {default or 'auto, the accelerator that PyTorch finds, else cpu'})"
    parser.add_argument("--device", type=_device, default=default or "auto", help=text)


MODEL_HELP = (
    "a name of the model zoo, the folder or a checkpoint of a run, a config (file or installed name), a folder of the "
    "transformers library, or hf:OWNER/NAME"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, its weights if MODEL is a config, and overrides; `sort_model` tells weights and overrides apart."""
    parser.add_argument("model", help=MODEL_HELP)
    parser.add_argument("weights", nargs="?", help="the weights of a config: a checkpoint, or a name of the model zoo")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="key.sub=value for the config, such as data.root=data/coco"
    )


def sort_model(args: argparse.Namespace) -> None:
    """Move an override that was parsed as the weights to the overrides."""
    if is_override(args.weights):
        args.weights, args.overrides = None, [args.weights, *args.overrides]


def split_weights(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split off the weights before overrides, which may follow a config's name; None without weights."""
    from vitkit.apps.inference.load import is_config_only

    has_weights = overrides and not is_override(overrides[0]) and not is_config_only(overrides[0])
    return (overrides[0], list(overrides[1:])) if has_weights else (None, list(overrides))


def add_batch_size(parser: argparse.ArgumentParser, *, default: int = 1, of: str = "images") -> None:
    """Add --batch-size."""
    text = f"number of {of} in a batch (default: {default})"
    parser.add_argument("--batch-size", type=positive, default=default, metavar="N", help=text)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add --precision, which falls back to what the device supports."""
    text = "precision to compute in, where PyTorch considers it safe (default: fp32)"
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help=text)


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Add --runtime, which is for exported models."""
    text = "what runs a model's ONNX file; openvino: on the CPU (default: onnxruntime)"
    parser.add_argument("--runtime", choices=RUNTIMES, default="onnxruntime", help=text)


def add_iou(parser: argparse.ArgumentParser, where: str) -> None:
    """Add --iou; `where` says what it is for."""
    text = f"IoU of a correct detection {where}: above 0.1, up to 1 (default: evaluator.iou, 0.5)"
    parser.add_argument("--iou", type=_correct_iou, metavar="IOU", help=text)


def _correct_iou(text: str) -> float:
    """Parse an IoU from which a detection is correct; below 0.1 it is an error on the background."""
    number = fraction(text)
    if number <= 0.1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0.1, up to 1")
    return number


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add --overwrite; without it no existing file is replaced."""
    parser.add_argument("--overwrite", action="store_true", help="replace what is there already at OUT")


def a_path(text: str) -> Path:
    """Return the path that an argument gives. An empty one, as of a variable that is not set, would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty, as a variable that is not set is; expected a path, such as '.'")
    return Path(text)


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return number


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to 1")
    return number


def image_size(text: str) -> tuple[int, int]:
    """Parse HEIGHTxWIDTH, "480x640" -> (480, 640), or a square's side, "640" -> (640, 640)."""
    height, separator, width = text.lower().partition("x")
    if not separator:
        width = height
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected HEIGHTxWIDTH in pixels, such as 480x640, or one number for a square, such as 640"
        )
    return int(height), int(width)


def one_of(names: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """Return a parser of one of `names()`, which are only computed when the option is given."""

    def parse(text: str) -> str:
        if text not in names():
            raise argparse.ArgumentTypeError(f"{text!r}: expected {', '.join(names())}")
        return text

    return parse


def add_tiles(
    parser: argparse.ArgumentParser,
    text: str = "predict in tiles of SIZE x SIZE pixels, for images much larger than those in training",
    *,
    required: bool = False,
) -> None:
    """Add --tiles and --tile-overlap; `tiling_of` reads them."""
    parser.add_argument("--tiles", type=int, metavar="SIZE", required=required, help=text)
    text = "minimum overlap of neighboring tiles (default: a quarter of SIZE)"
    parser.add_argument("--tile-overlap", type=int, metavar="PIXELS", help=text)


def tiling_of(size: int | None, overlap: int | None) -> Tiling | None:
    """Return how images are cut into tiles; None without a size.

    Raises:
        ConfigError: the sizes are out of range, or an overlap is given without a size.
    """
    from vitkit.apps.inference import Tiling

    if size is None and overlap is not None:
        raise ConfigError("--tile-overlap: the size of the tiles is also needed (--tiles SIZE).")
    return None if size is None else Tiling(size, overlap)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add --trust, without which files run only code that the user has run or trusted before."""
    text = "run the modules that a saved config imports, and exported programs (.pt2); remembered until they change"
    parser.add_argument("--trust", action="store_true", help=text)


def _device(text: str) -> str:
    from vitkit.devices import accelerators, default_device

    if text == "auto":
        return default_device()
    choices = ["cpu", *accelerators()]
    if text not in choices:
        here = "" if len(choices) > 1 else "; PyTorch finds no accelerator here"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {' or '.join(choices)}{here}")
    return text


_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_FOLDER_ERRORS = {errno.ENOTDIR, errno.EEXIST}
_NAME_ERRORS = {errno.ENAMETOOLONG, errno.ELOOP}
_SHOWN_OF_NAME = 200


@contextmanager
def errors_in_one_line(*others: type[Exception]) -> Iterator[None]:
    """End the program with one line, without a stack trace, at a VitkitError or another error that a user can cause.

    If the reader of its output has closed the pipe, such as `head`, the program ends without a line, as if by SIGPIPE.
    """
    try:
        with printing():
            yield
    except BrokenPipeError:
        sys.exit(141)
    except (VitkitError, *others) as error:
        sys.exit(error_line(error))
    except Exception as error:
        line = machine_error_line(error)
        if line is None and (place := place_in_own_code(error)) is not None:
            line = printable(shorten(f"error: {place}: {type(error).__name__}: {error}"))
        if line is None:
            raise
        sys.exit(line)


def machine_error_line(error: BaseException) -> str | None:
    """Return the line with which tools report a lost rank or an error of memory, a file's name or storage; None for
    another error."""
    from vitkit.apps.training.process_group import has_lost_peer
    from vitkit.devices import is_out_of_memory
    from vitkit.distributed import rank

    if has_lost_peer(error):
        return f"error (rank {rank()}): another rank has ended, and this one with it; see that one's error."
    if is_out_of_memory(error):
        reason = str(error).split("\n")[0] or type(error).__name__
        return f"error: out of memory ({reason}). End other programs, or give this one less to do."
    if not isinstance(error, OSError) or error.errno not in _STORAGE_ERRORS | _FOLDER_ERRORS | _NAME_ERRORS:
        return None
    if error.filename is None and error.errno == errno.ENOSPC and _is_of_multiprocessing(error):
        return (
            "error: /dev/shm: no space left for what the processes that load data share. Give it more, in a container "
            "by --shm-size=8g or --ipc=host, or set data.num_workers=0."
        )
    name = str(error.filename or "the output")
    if error.errno in _NAME_ERRORS:
        return f"error: {name[:_SHOWN_OF_NAME]}: {error.strerror}. Expected the name of a file or a folder."
    if error.errno in _FOLDER_ERRORS:
        return f"error: {name}: expected a folder, but there is a file. Choose another folder."
    return f"error: {name}: {error.strerror}. Free space or fix the permissions there, or choose another folder."


def _is_of_multiprocessing(error: BaseException) -> bool:
    """Whether an error comes from Python's own queues and locks of processes."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.split(".")[0] == "multiprocessing" for name in names)


def is_override(text: str | None) -> bool:
    """Whether an argument is `key.sub=value` rather than a file or a URL."""
    return text is not None and bool(re.match(r"[A-Za-z_][\w.]*=", text)) and not os.path.exists(text)


def new_file(name: str, model: str | Path = "") -> Path:
    """Return the default path of a command's output: in the folder of a run, or else the current one.

    It gets a number if that path exists, so that no file is replaced that the user has not named.

    Args:
        model: a run or one of its checkpoints; anything else stands for the current folder.
    """
    folders = (Path(model), Path(model).parent)
    folder = next((f for f in folders if model and os.path.isfile(f / "config.json")), Path())
    path = folder / name
    for number in itertools.count(2):
        if not path.exists():
            return path
        path = (folder / name).with_stem(f"{Path(name).stem}-{number}")


def check_out(option: str, path: Path | None) -> None:
    """Raise a ConfigError if an output file cannot be written, before the work begins."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}). Choose another file.") from error


def require_images(loaded: Loaded, name: str) -> None:
    """Raise a ConfigError that names the suitable command if a model takes text."""
    from vitkit.apps.inference import Predictor, Translator

    if not isinstance(loaded, Predictor):
        command = "translate" if isinstance(loaded, Translator) else "generate"
        raise ConfigError(f"{name}: reads text, not images. Use vitkit {command}.")


def require_text_model(loaded: Loaded, name: str, kinds: type | UnionType) -> None:
    """Raise a ConfigError that names the suitable command if a model is not of one of these kinds."""
    from vitkit.apps.inference import Predictor, Translator

    if isinstance(loaded, kinds):
        return
    kind = type(loaded.model).__name__
    if isinstance(loaded, Predictor):
        raise ConfigError(f"{name}: {kind} takes images, not text. Use vitkit predict.")
    if isinstance(loaded, Translator):
        raise ConfigError(f"{name}: {kind} translates text. Use vitkit translate.")
    raise ConfigError(f"{name}: {kind} is a language model. Use vitkit generate.")
