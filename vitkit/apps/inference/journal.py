"""A folder's journal: each input's results as a line of JSON, written as soon as it is predicted.

A prediction that was killed is resumed from it, and processes that share the inputs are merged from theirs.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.engine.run_folder import describe_process
from vitkit.errors import ConfigError, DataError
from vitkit.io.folders import IMAGE_SUFFIXES, OUTPUT_LIST, WHOLE_FOLDER, declare_output, listed_output
from vitkit.io.json_files import read_json
from vitkit.io.local_cache import hold_lock
from vitkit.io.output import check_links, unwritable, write_text

SETTINGS_NAME = "predictions_settings.json"
"""What the predictions of a folder are made with; `Journal` compares it."""
RESULTS_NAME = "predictions.json"
REVIEW_ORDER = "review_order.txt"
"""In the folder of a format's annotations: the images, the least certain first."""
_NAME = re.compile(r"predictions(-\d+-of-\d+)?\.jsonl")
_LOCK = ".predictions.lock"
_MISSING, _CHANGED, _FAILED, _DONE = range(4)
_KINDS = {"image": _DONE, "video": _DONE, "failed": _FAILED, "started": _MISSING}


class Shard(NamedTuple):
    """The part of the inputs that a process predicts: every `of`-th batch of images, and every `of`-th video."""

    number: int = 0
    """From 0."""
    of: int = 1

    @property
    def file_name(self) -> str:
        """The name of its journal."""
        return "predictions.jsonl" if self.of == 1 else f"predictions-{self.number + 1}-of-{self.of}.jsonl"

    def excludes(self, journal: str) -> bool:
        """Whether another process must not write the journal of this name at the same time."""
        return self.of == 1 or journal == self.file_name or not journal.endswith(f"-of-{self.of}.jsonl")

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
        ConfigError: another process predicts into the folder, unless it is another of as many shards; or the earlier
            predictions were made with other settings.
        DataError: there are earlier predictions, and they are neither to be resumed nor overwritten, or a file cannot
            be written.
    """

    def __init__(
        self, folder: Path, shard: Shard, settings: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
    ):
        self.folder, self.path, self._settings_path = folder, folder / shard.file_name, folder / SETTINGS_NAME
        self._settings = json.loads(json.dumps(settings))
        folder.mkdir(parents=True, exist_ok=True)
        declare_output(folder)
        with ExitStack() as stack:
            try:
                with hold_lock(folder / _LOCK):  # processes begin one after another
                    self._lock(shard, stack)
                    self._begin(shard, resume=resume, overwrite=overwrite)
                    self._file = stack.enter_context(self.path.open("ab+", buffering=0))
                    self._cut_off_half_line()
            except OSError as error:
                raise unwritable(self.path, error) from error
            self._stack = stack.pop_all()

    def _lock(self, shard: Shard, stack: ExitStack) -> None:
        """Lock this process's journal until it ends, if no process is at work that would be disturbed."""
        own = _lock_of(self.path)
        for lock in {own, *self.folder.glob(_lock_of(Path("predictions*.jsonl")).name)}:
            if not shard.excludes(lock.name[1 : -len(".lock")]):
                continue
            try:
                if lock == own:
                    stack.enter_context(hold_lock(lock, wait=False))
                elif lock.exists():
                    with hold_lock(lock, wait=False):
                        lock.write_bytes(b"")  # of a killed process
            except BlockingIOError as error:
                owner = lock.read_text(encoding="utf-8") or "it has not named itself"
                raise ConfigError(
                    f"--out {self.folder}: another process is writing '{lock.name[1 : -len('.lock')]}' ({owner}). Wait "
                    "until it has ended, choose another folder, or give each process a shard of its own (--shard 1/2 "
                    "and --shard 2/2)."
                ) from error
        own.write_text(describe_process(), encoding="utf-8")
        stack.callback(own.write_bytes, b"")

    def _begin(self, shard: Shard, *, resume: bool, overwrite: bool) -> None:
        """Remove or keep the earlier lines, and write the settings or compare them."""
        # The others of this shard's number may be at work; those of another number are from an earlier prediction.
        results = [path for path in (self.folder / RESULTS_NAME,) if path.exists()]
        started = [path for path in journals(self.folder) if shard.excludes(path.name) and path.stat().st_size]
        if overwrite:
            for path in (*journals(self.folder), self._settings_path):
                path.unlink(missing_ok=True)
            _remove_written(self.folder)
        elif (results or started) and not resume:
            raise DataError(
                f"--out {self.folder}: '{(*results, *started)[0]}' exists already. Continue it by --resume "
                f"{self.folder}, choose another folder, or add --overwrite."
            )
        if (resume or shard.of > 1) and self._settings_path.exists():
            self.check_settings()
        else:
            write_text(self._settings_path, json.dumps(self._settings, indent=1), below=self.folder)
        check_links(self.path, self.folder)
        if not resume:  # a link would be followed
            self.path.unlink(missing_ok=True)

    def check_settings(self) -> None:
        """Raise a ConfigError that names the first setting of the folder's predictions that differs from this
        process's; where files cannot be locked, another process may have written it meanwhile."""
        _check_same(read_json(self._settings_path, key="--resume"), self._settings, self._settings_path)

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
        with self._stack:
            is_empty = self._file.tell() == 0
            self._file.close()
            if is_empty and exception[0] is not None and not journals(self.folder, but=self.path):
                self.remove()

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
        states: (count,) uint64, see `states_of`: lines of other states do not count; None: all do.
    """

    def __init__(self, folder: Path, count: int, states: np.ndarray | None = None):
        self.paths = journals(folder)
        self._kinds = np.full(count, _MISSING, np.uint8)
        self.files, self.offsets = np.zeros(count, np.int32), np.zeros(count, np.int64)
        self._is_video, self.started = np.zeros(count, bool), np.zeros(count, bool)
        for number, path in enumerate(self.paths):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    self._add(number, offset, line, states)
                    offset += len(line)

    def _add(self, number: int, offset: int, line: bytes, states: np.ndarray | None) -> None:
        try:  # A damaged line, as by a loss of power, is to be predicted again, as is one without its end.
            entry = json.loads(line)
            index, what = entry["index"], list(entry)[1]
            kind = _KINDS[what]
            is_current = states is None or int(entry.get("state", ""), 16) == states[index]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return
        if not 0 <= index < len(self._kinds) or not line.endswith(b"\n"):
            return
        kind = kind if is_current else min(kind, _CHANGED)
        if what == "started":
            self.started[index] = is_current
        elif kind >= self._kinds[index]:
            self._kinds[index], self.files[index], self.offsets[index] = kind, number, offset
            self._is_video[index] = what == "video"

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
    def num_changed(self) -> int:
        """The number of inputs that were changed since they were predicted."""
        return int((self._kinds == _CHANGED).sum())

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
                entry.pop("state", None)
                yield entry


def journals(folder: Path, *, but: Path | None = None) -> list[Path]:
    """Return the journals in a folder, sorted by name."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path != but)
    return []


def states_of(paths: Iterable[Path]) -> np.ndarray:
    """Return (len(paths),) uint64: numbers that change if a file, or one in a folder of frames, is written again; 0 for
    what is not a file, such as a camera."""
    return np.array([_state(path) for path in paths], np.uint64)


def _state(path: Path) -> int:
    digest = hashlib.blake2b(digest_size=8)
    try:
        for file in sorted(path.iterdir()) if path.is_dir() else (path,):
            stat = file.stat()
            digest.update(os.fsencode(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0"))
    except OSError:
        return 0
    return int.from_bytes(digest.digest(), "big")


def _lock_of(journal: Path) -> Path:
    return journal.with_name(f".{journal.name}.lock")


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


def _remove_written(folder: Path) -> None:
    """Remove the drawings, maps and annotations of an earlier prediction from a folder that vitkit has made."""
    if WHOLE_FOLDER not in listed_output(folder):
        return
    for listing in folder.rglob(OUTPUT_LIST):
        for name in listed_output(listing.parent) - {WHOLE_FOLDER, ""}:
            path = listing.parent / name
            if path.suffix.lower() in (*IMAGE_SUFFIXES, ".mp4") and not path.is_symlink():
                path.unlink(missing_ok=True)
    for order in folder.glob(f"*/{REVIEW_ORDER}"):
        shutil.rmtree(order.parent)
