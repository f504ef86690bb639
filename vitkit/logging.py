"""Messages and progress on the console."""

import logging
import os
import sys
import time
from contextlib import AbstractContextManager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from vitkit.distributed import is_main
from vitkit.errors import VitkitError, error_line
from vitkit.text_format import printable

LOG_NAME = "log.jsonl"
CONSOLE_NAME = "console.txt"
_printed = logging.Logger("vitkit.printed")
"""Receives each line of `print_line`, for `ConsoleCopy` only."""
_printed.addHandler(logging.NullHandler())


class _LevelFormatter(logging.Formatter):
    """Writes only the message, after "warning: " or "error: " if it is one."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return f"{record.levelname.lower()}: {message}" if record.levelno >= logging.WARNING else message


def setup_logging(*, verbose: bool = False) -> None:
    """Send the "vitkit" logger's messages to standard error; from processes other than the main one, only errors.

    Args:
        verbose: print lines with all their details, see `print_line`.
    """
    logger = logging.getLogger("vitkit")
    logger.setLevel((logging.DEBUG if verbose else logging.INFO) if is_main() else logging.ERROR)
    handler = next((h for h in logger.handlers if isinstance(h, logging.StreamHandler)), None)
    if handler is None:
        handler = logging.StreamHandler()
        handler.setFormatter(_LevelFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    handler.stream = sys.stderr  # it may have been replaced since the last call


def print_line(line: str, *, full: str | None = None) -> None:
    """Print a line on the console, from the main process only.

    If the output goes to a full disk, or to a closed pipe or terminal, the output ends but the run continues.

    Args:
        full: the line with all details, for the run's console.txt and, if `setup_logging` made it verbose, the console.
    """
    if not is_main():
        return
    line, full = printable(line), None if full is None else printable(full)
    _printed.info(full or line)
    stream = sys.stdout.stream if isinstance(sys.stdout, _CopiedOutput) else sys.stdout
    try:
        verbose = full is not None and logging.getLogger("vitkit").isEnabledFor(logging.DEBUG)
        print(full if verbose else line, file=stream, flush=True)
    except OSError as error:
        logging.getLogger("vitkit").warning("standard output: no longer written (%s)", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _CopiedOutput:
    """Standard output whose complete lines, such as a hook's `print`, are copied like those of `print_line`."""

    def __init__(self, stream: Any):
        self.stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        """Write text; of a line that overwrites itself, such as a progress bar, the last state is copied."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            _printed.info("%s", line.rpartition("\r")[2])
        return self.stream.write(text)

    def end(self) -> Any:
        """Copy a line that was begun, and return the output itself."""
        if self._rest:
            self.write("\n")
        return self.stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class ConsoleCopy(AbstractContextManager):
    """A copy of the console in a file, on the main process: what is printed, messages, and the error at the end.

    Lines from before `begin` are kept in memory until then. If the disk is full, only the copy ends, not the run.
    """

    def __enter__(self) -> "ConsoleCopy":
        self._memory = MemoryHandler(capacity=sys.maxsize, flushLevel=sys.maxsize)
        if is_main():
            for logger in (logging.getLogger("vitkit"), _printed):
                logger.addHandler(self._memory)
            sys.stdout = _CopiedOutput(sys.stdout)
        return self

    def begin(self, path: Path) -> None:
        """Append to a file from now on, beginning with the lines so far."""
        file = _QuietFile(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._memory.setTarget(file)
        self._memory.flush()
        self._memory.capacity = 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, VitkitError):
            _printed.error(error_line(error))
        elif isinstance(error, Exception):
            _printed.error("", exc_info=error)
        if isinstance(sys.stdout, _CopiedOutput):  # something else may have replaced it since
            sys.stdout = sys.stdout.end()
        for logger in (logging.getLogger("vitkit"), _printed):
            logger.removeHandler(self._memory)
        file = self._memory.target
        self._memory.close()
        if file is not None:
            with suppress(OSError):
                file.close()


class _QuietFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Do not report a full disk: other writers to the same disk will."""


class ProgressLines:
    """Prints the progress of a loop and its expected duration, every few seconds and at the end.

    Args:
        total: number of items; 0 if unknown.
        items: name of the items, such as "images".
        every: seconds between lines.
    """

    def __init__(self, total: int, items: str, *, every: float = 5.0):
        self.total, self.items, self.every = total, items, every
        self.done = 0
        self.start = self.last = time.monotonic()

    def step(self) -> None:
        """Count one item, and print a line if the last line is more than `every` seconds old."""
        self.done += 1
        if time.monotonic() - self.last > self.every:
            self.last = time.monotonic()
            eta = f"  ETA {(self.total - self.done) / self.rate():.0f} s" if self.total >= self.done else ""
            print_line(f"{self.done}/{self.total or '?'} {self.items}  {self.rate():.2f} it/s{eta}")

    def finish(self) -> None:
        """Print the number of items and their rate."""
        print_line(f"{self.done} {self.items}, {self.rate():.2f} it/s")

    def rate(self) -> float:
        """Return items per second since the start."""
        return self.done / max(time.monotonic() - self.start, 1e-9)
