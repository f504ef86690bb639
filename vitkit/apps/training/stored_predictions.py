"""Stored predictions on the disk: an evaluation that was killed is resumed from them."""

import io
import logging
import os
import pickle
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from vitkit.distributed import barrier, is_main, rank, world_size
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.base import SampleEvaluator
from vitkit.protocols.evaluator import Evaluator

logger = logging.getLogger("vitkit")
_SIZE = struct.Struct("<Q")
_NUMPY = {"numpy", "numpy.core.multiarray", "numpy.core.numeric", "numpy._core.multiarray", "numpy._core.numeric"}
_NUMPY_NAMES = {"ndarray", "dtype", "_reconstruct", "_frombuffer", "scalar"}


class PredictionFiles:
    """A folder with a file of each rank: what the evaluation depends on, and then the predictions of each batch.

    All ranks make it and call `begin`. A folder that cannot be written is a warning: the evaluation goes on without.

    Args:
        folder: the folder.
        resume: continue what is in it; otherwise it is removed.
        begins_anew: what is in it is also removed, instead of an error, if it is damaged or of another evaluation.
    """

    def __init__(self, folder: Path, *, resume: bool, begins_anew: bool = False):
        self.folder, self.resume, self.begins_anew = folder, resume, begins_anew
        self.num_done = 0
        """The number of samples that had a prediction at the beginning."""
        self._file: io.BufferedWriter | None = None

    def begin(self, evaluator: Evaluator, settings: Mapping[str, Any]) -> set[Any]:
        """Give the evaluators of all ranks a share of the earlier predictions, and return the samples that have one.

        Args:
            settings: what the predictions depend on, plain values.
        Raises:
            ConfigError: it is to be resumed, and an evaluator stores no predictions by sample, or the earlier ones
                depend on something else.
            DataError: a file is damaged.
        """
        self._parts = [part for part in evaluator.parts if isinstance(part, SampleEvaluator)]
        if len(self._parts) < len(evaluator.parts):
            if self.resume and not self.begins_anew:
                name = type(evaluator).__name__
                raise ConfigError(f"--resume: {name} stores no predictions by sample. Leave it out.")
            return set()
        try:
            batches = list(self._read(settings)) if self.resume else []
        except (ConfigError, DataError):
            if not self.begins_anew:
                raise
            logger.warning("%s: what is there is of another evaluation, or damaged: it begins anew", self.folder)
            self.resume, batches = False, []
        barrier()  # before a file is written that another rank reads
        if is_main() and not self.resume:
            self.remove()
        barrier()
        done: set[Any] = set()
        for number, batch in enumerate(batches):
            done |= set.intersection(*(set(part) for part in batch))
            if number % world_size() == rank():
                for part, entries in zip(self._parts, batch):
                    part.stored_predictions |= entries
        self._counts = [len(part.stored_predictions) for part in self._parts]
        self._open(settings)
        self.num_done = len(done)
        return done

    def add(self) -> None:
        """Write the predictions that the evaluators have stored since the last call."""
        if self._file is None:
            return
        batch = []
        for number, part in enumerate(self._parts):
            keys = list(islice(reversed(part.stored_predictions), len(part.stored_predictions) - self._counts[number]))
            batch.append({key: part.stored_predictions[key] for key in reversed(keys)})
            self._counts[number] = len(part.stored_predictions)
        if any(batch):
            self._write(batch)

    def remove(self) -> None:
        """Remove the folder, whose predictions are then in the results."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / f"{rank()}.stored_predictions"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            end = 0
            with suppress(FileNotFoundError):
                end = max((end for _, end in _frames(path)), default=0)
            self._file = path.open("ab")
            self._file.truncate(end)
        except OSError as error:
            self._give_up(error)
        else:
            if end == 0:
                self._write(dict(settings))

    def _write(self, content: Any) -> None:
        data = pickle.dumps(content, protocol=5)
        try:
            self._file.write(_SIZE.pack(len(data)) + data)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning("%s: predictions are not stored for --resume (%s)", self.folder, error.strerror)

    def _read(self, settings: Mapping[str, Any]) -> Iterator[list[dict[Any, Any]]]:
        """Read the batches of all files; half a last one, of a killed process, is left out."""
        modules = {cls.__module__ for part in self._parts for cls in type(part).__mro__}
        for path in sorted(self.folder.glob("*.stored_predictions")):
            for number, (data, _) in enumerate(_frames(path)):
                content = _read_predictions(data, modules, path)
                if number:
                    yield content
                    continue
                for key, value in settings.items():
                    if content.get(key) != value:
                        raise ConfigError(
                            f"--resume: the predictions in '{self.folder}' are of another evaluation, whose {key} "
                            "differs. Give the same model, config and options, or leave out --resume to begin anew."
                        )


class _PredictionReader(pickle.Unpickler):
    """Reads plain values, arrays, and the named tuples of the evaluators' modules; nothing else is called."""

    def __init__(self, data: bytes, modules: set[str]):
        super().__init__(io.BytesIO(data))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        if module in _NUMPY and name in _NUMPY_NAMES:
            return super().find_class(module, name)
        if module in self._modules or module.startswith("vitkit.evaluation."):
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, tuple):
                return found
        raise DataError(f"names {module}.{name}, which is not a stored prediction")


def _read_predictions(data: bytes, modules: set[str], path: Path) -> Any:
    try:
        return _PredictionReader(data, modules).load()
    except Exception as error:  # damaged data raise errors of many types
        raise DataError(f"--resume: '{path}' is damaged ({error}). Leave out --resume to begin anew.") from error


def _frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the pickles of a file, and where each ends."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        while len(head := file.read(_SIZE.size)) == _SIZE.size:
            (size,) = _SIZE.unpack(head)
            if file.tell() + size > end:  # half a one, of a killed process
                return
            yield file.read(size), file.tell()
