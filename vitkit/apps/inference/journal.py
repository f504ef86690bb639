"""A folder's journal: each input's results as a line of JSON, written as soon as it is predicted.

A prediction that was killed is resumed from it, and processes that share the inputs are merged from theirs.
"""

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.errors import ConfigError, DataError
from vitkit.io.json_files import read_json
from vitkit.io.output import check_links, unwritable, write_text

try:
    import fcntl
except ImportError:  # Windows, where a folder cannot be locked
    fcntl = None

SETTINGS_NAME = "predictions_settings.json"
"""What the predictions of a folder are made with; `Journal` compares it."""
RESULTS_NAME = "predictions.json"
_NAME = re.compile(r"predictions(-\d+-of-\d+)?\.jsonl")
_LINE = re.compile(rb'\{"index": (\d+), "(image|video|failed)": ')
_MISSING, _FAILED, _DONE = range(3)


class Shard(NamedTuple):
    """The part of the inputs that a process predicts: every `of`-th batch of images, and every `of`-th video."""

    number: int = 0
    """From 0."""
    of: int = 1

    @property
    def file_name(self) -> str:
        """The name of its journal."""
        return "predictions.jsonl" if self.of == 1 else f"predictions-{self.number + 1}-of-{self.of}.jsonl"

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.of}"


class Journal:
    """The lines that this process writes, in a file that no other process writes at the same time.

    Args:
        folder: the folder of the results, which is made.
        shard: the part of the inputs that this process predicts.
        settings: what the predictions are made with; plain values.
        resume: continue the lines that are there already.
        overwrite: remove the lines that are there already, also those of other shards.
    Raises:
        ConfigError: another process writes the file, or the earlier predictions were made with other settings.
        DataError: there are earlier predictions, and they are neither to be resumed nor overwritten, or a file cannot
            be written.
    """

    def __init__(
        self, folder: Path, shard: Shard, settings: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ):
        self.path, self._settings_path = folder / shard.file_name, folder / SETTINGS_NAME
        settings = json.loads(json.dumps(settings))
        # The others of this shard's number may be at work; those of another number are from an earlier prediction.
        others = [path for path in journals(folder) if shard.of == 1 or not path.name.endswith(f"-of-{shard.of}.jsonl")]
        started = [path for path in (self.path, *others) if path.exists() and path.stat().st_size]
        if overwrite:
            for path in (*journals(folder), self._settings_path):
                path.unlink(missing_ok=True)
        elif started and not resume:
            raise DataError(
                f"--out {folder}: '{started[0]}' exists already. Continue it by --resume {folder}, choose "
                "another folder, or add --overwrite."
            )
        is_shared = resume or shard.of > 1
        if is_shared and self._settings_path.exists():
            _check_same(read_json(self._settings_path, key="--resume"), settings, self._settings_path)
        else:
            write_text(self._settings_path, json.dumps(settings, indent=1), below=folder)
        check_links(self.path, folder)
        try:
            if not resume:  # a link would be followed
                self.path.unlink(missing_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            self._lock()
            self._cut_off_half_line()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def add(self, index: int, entry: Mapping[str, Any]) -> None:
        """Write the line of an input; it is in the file, though perhaps not on the disk yet, when this returns.

        Args:
            index: the input's number among all, videos after images.
            entry: its first key is "image", "video" or "failed".
        Raises:
            DataError: it cannot be written.
        """
        line = json.dumps({"index": index, **entry}).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):  # the rest of the disk was too small
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self.path, error) from error

    def remove(self) -> None:
        """Remove the file and the settings of a prediction."""
        for path in (self.path, self._settings_path):
            path.unlink(missing_ok=True)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception: object) -> None:
        is_empty = self._file.tell() == 0
        self._file.close()
        if is_empty and exception[0] is not None and not journals(self.path.parent, but=self.path):
            self.remove()

    def _lock(self) -> None:
        """Lock the file, which the system unlocks when the process ends, even by SIGKILL."""
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                f"--out {self.path.parent}: another process is writing '{self.path.name}'. Wait until it has ended, or "
                "give each process a shard of its own (--shard 1/2 and --shard 2/2)."
            ) from error
        except OSError:  # a network file system without locks
            return

    def _cut_off_half_line(self) -> None:
        """Remove the incomplete last line that a killed process wrote."""
        end = position = self._file.seek(0, 2)
        while position > 0:
            start = max(position - (1 << 16), 0)
            self._file.seek(start)
            newline = self._file.read(position - start).rfind(b"\n")
            position = start + newline + 1
            if newline >= 0:
                break
        if position < end:
            self._file.truncate(position)
        self._file.seek(0, 2)


class Lines:
    """The lines of all journals in a folder; for each input the last line, or the last successful one.

    In memory are a few bytes for each input.

    Args:
        count: the number of inputs.
    """

    def __init__(self, folder: Path, count: int):
        self.paths = journals(folder)
        self._kinds = np.full(count, _MISSING, np.uint8)
        self.files, self.offsets = np.zeros(count, np.int32), np.zeros(count, np.int64)
        self._is_video = np.zeros(count, bool)
        for number, path in enumerate(self.paths):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    self._add(number, offset, line)
                    offset += len(line)

    def _add(self, number: int, offset: int, line: bytes) -> None:
        match = _LINE.match(line)
        if match is None or not line.endswith(b"}\n"):  # damaged, as by a loss of power: to be predicted again
            return
        index, kind = int(match[1]), _FAILED if match[2] == b"failed" else _DONE
        if index < len(self._kinds) and kind >= self._kinds[index]:
            self._kinds[index], self.files[index], self.offsets[index] = kind, number, offset
            self._is_video[index] = match[2] == b"video"

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def done(self) -> np.ndarray:
        """(count,) bool, whether an input was predicted; one that failed was not."""
        return self._kinds == _DONE

    @property
    def num_missing(self) -> int:
        """The number of inputs without a line."""
        return int((self._kinds == _MISSING).sum())

    @property
    def images(self) -> "Entries":
        """The entries of the images, in the order of the inputs."""
        return Entries(self, self.done & ~self._is_video)

    @property
    def videos(self) -> "Entries":
        """The entries of the videos, in the order of the inputs."""
        return Entries(self, self.done & self._is_video)

    @property
    def failures(self) -> "Entries":
        """The entries of the inputs that failed."""
        return Entries(self, self._kinds == _FAILED)


class Entries:
    """Entries of a folder's journals, which are read from the disk each time that they are iterated.

    Args:
        chosen: (count,) bool, the inputs.
    """

    def __init__(self, lines: Lines, chosen: np.ndarray):
        self._lines, self._chosen = lines, chosen

    def __len__(self) -> int:
        return int(self._chosen.sum())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in self._lines.paths]
            for index in np.flatnonzero(self._chosen).tolist():
                file = files[self._lines.files[index]]
                file.seek(self._lines.offsets[index])
                entry = json.loads(file.readline())
                del entry["index"]
                yield entry


def journals(folder: Path, *, but: Path | None = None) -> list[Path]:
    """Return the journals in a folder, sorted by name."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path != but)
    return []


def _check_same(earlier: Any, settings: Mapping[str, Any], path: Path) -> None:
    """Raise a ConfigError that names the first setting that differs."""
    for key, value in settings.items():
        before = earlier.get(key) if isinstance(earlier, dict) else None
        if before != value:
            raise ConfigError(
                f"--out {path.parent}: its predictions were made with {key} {_short(before)}, and now it is "
                f"{_short(value)} ('{path.name}'). Give the same, or choose another folder."
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
