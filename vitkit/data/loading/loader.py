"""Loads a dataset as batches in worker processes, and handles their failures."""

import logging
import multiprocessing
import multiprocessing.queues
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitkit.data.loading.batch_augmentation import BatchAugmentation
from vitkit.data.loading.samplers import EvalBatches, SeededIndex, TokenBatches, TrainBatches
from vitkit.errors import ConfigError, DataError, VitkitError
from vitkit.protocols.dataset import Dataset
from vitkit.structures import Batch, Sample
from vitkit.text.class_prompts import PromptStep, collate_prompted

logger = logging.getLogger("vitkit")
_MAX_LOGGED = 20
_MAX_ATTEMPTS = 10
_NO_MAIN_GUARD = 78
"""The exit code of a process that would load data, but runs the script that starts it instead."""
Batches = TrainBatches | EvalBatches | TokenBatches | list[list[SeededIndex]]
StartMethod = Literal["fork", "spawn", "forkserver"]


class BatchLoader:
    """Batches of a dataset, loaded in worker processes. Iterating yields one epoch.

    Args:
        dataset: `dataset[(index, seed)]` returns a sample; if it has a `collate` of its own, that joins the samples.
        batches: indices and seeds of the samples of each batch.
        training: keep the workers between epochs, and tell the dataset the epoch.
        augment: augments the samples of a batch together; None: it does not.
        device: batches are moved there and go through the dataset's `batch_transforms`, if it has any; None: neither.
        num_workers, start_workers, pin_memory: see `DataSettings`.
        skip_errors: replace samples whose files cannot be used by others.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: Batches,
        *,
        training: bool,
        augment: BatchAugmentation | None = None,
        device: torch.device | None = None,
        num_workers: int = 0,
        start_workers: StartMethod | None = None,
        pin_memory: bool | None = None,
        skip_errors: bool = False,
    ):
        self.dataset = dataset
        self.batches = batches
        self.device = device
        self.num_skipped = 0
        """Number of this rank's samples that were replaced because their files cannot be used."""
        self.num_padded = 0
        """Number of this rank's videos, in this epoch so far, that were padded because they are shorter than a clip."""
        self._logged: dict[str, set[str]] = {"skipped": set(), "padded": set()}
        has_workers = num_workers > 0
        prompt = None if dataset.prompts is None else PromptStep(dataset, training=training)
        self._loader = DataLoader(
            _BatchedDataset(dataset, skip_errors=skip_errors, augment=augment, prompt=prompt),
            batch_sampler=_BatchRequests(batches, with_epochs=training),
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=torch.accelerator.is_available() if pin_memory is None else pin_memory,
            persistent_workers=training and has_workers,
            worker_init_fn=_start_worker,
            multiprocessing_context=start_workers if has_workers else None,
            # A separate generator: a number per epoch drawn from the global one would make a resumed run, which starts
            # one more iteration, differ from the interrupted run.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Load the batches of the epoch.

        Raises:
            DataError: an image of the batch is missing or invalid.
            ConfigError: the processes that load data run the script that starts them.
        """
        self.num_padded = 0
        for loaded in self._loaded():
            if isinstance(loaded, VitkitError):
                raise loaded
            batch, errors = loaded
            self.num_skipped += len(errors)
            for error in errors:
                # Logged as an error: ranks other than the main one print nothing less severe, and each rank sees
                # different files.
                message = f"{error} Another sample takes its place (data.on_error=skip)."
                self._log_once("skipped", logging.ERROR, message)
            # The views of a video share one target.
            padded = {str(target["image_id"]) for target in batch.targets if target.get("is_padded")}
            self.num_padded += len(padded)
            for name in sorted(padded):
                message = f"video '{name}' is shorter than a clip: its last frame is repeated."
                self._log_once("padded", logging.WARNING, message)
            if self.device is not None and self.dataset.batch_transforms is not None:
                batch = self.dataset.batch_transforms(batch.to(self.device))
            yield batch

    def _loaded(self) -> Iterator[tuple[Batch, list[str]] | VitkitError]:
        if self._loader.num_workers > 0:
            leave_imported_main()
        others = multiprocessing.active_children()
        iterator = iter(self._loader)
        started = set(multiprocessing.active_children()).difference(others)
        try:
            yield from iterator
        except RuntimeError:
            if all(process.exitcode != _NO_MAIN_GUARD for process in started):
                raise
            raise ConfigError(
                f"data.num_workers={self._loader.num_workers}: the processes that load data first import the script "
                f"'{sys.modules['__main__'].__file__}', which trains or evaluates as soon as it is imported. Put what "
                'it runs below `if __name__ == "__main__":`, or set data.num_workers=0.'
            ) from None

    def _log_once(self, kind: str, level: int, message: str) -> None:
        """Log a message about a file, unless it or many of its kind were logged before."""
        logged = self._logged[kind]
        if len(logged) < _MAX_LOGGED and message not in logged:
            logged.add(message)
            more = " Later ones are only counted." if len(logged) == _MAX_LOGGED else ""
            logger.log(level, "%s%s", message, more)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Choose the epoch of the next iteration, and how many of its batches to skip without loading them."""
        self.batches.set_position(epoch, batch)


class _BatchRequest(NamedTuple):
    """A request to a worker: to load the samples of one batch."""

    samples: list[SeededIndex]
    epoch: int | None
    """None: the batch is for evaluation."""
    number: int
    """Number of the batch in its epoch."""


@dataclass(eq=False)
class _BatchRequests:
    """The batches as requests; workers that stay between epochs learn the epoch from them."""

    batches: Batches
    with_epochs: bool

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[_BatchRequest]:
        epoch, first = (self.batches.epoch, self.batches.first_batch) if self.with_epochs else (None, 0)
        for number, samples in enumerate(self.batches, start=first):
            yield _BatchRequest(samples, epoch, number)


@dataclass(eq=False)
class _BatchedDataset:
    """Loads, augments and collates a complete batch in the worker."""

    dataset: Dataset
    skip_errors: bool
    augment: BatchAugmentation | None
    prompt: PromptStep | None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: _BatchRequest) -> tuple[Batch, list[str]] | VitkitError:
        """Return a batch with the messages of skipped samples, or the error if a sample cannot be loaded."""
        errors: list[str] = []
        if request.epoch is not None:
            self.dataset.set_epoch(request.epoch)
        if self.augment is not None:
            self.dataset.square = self.augment.side(request.epoch, request.number)
        try:
            samples = [self._sample(index, errors) for index in request.samples]
            if self.augment is not None:
                samples = self.augment(samples, request.epoch, request.number)
            if self.dataset.collate is None:
                check_batch(samples)
            if self.prompt is not None:
                return collate_prompted(self.prompt, samples, [seed for _, seed in request.samples]), errors
        except VitkitError as error:
            # If it were raised in a worker, the user would only see it as text within a traceback.
            return error
        return (self.dataset.collate or Batch.collate)(samples), errors

    def _sample(self, index: SeededIndex, errors: list[str]) -> Sample:
        """Load a sample; if its file is to be skipped, append the error and load another one, drawn by its seed."""
        for attempt in range(_MAX_ATTEMPTS):
            try:
                sample = self.dataset[index]
                if self.prompt is not None:
                    self.prompt.check(sample)
                return sample
            except DataError as error:
                if not self.skip_errors:
                    raise
                errors.append(str(error))
            random = np.random.default_rng([index[1], attempt])
            indices = self.dataset.training_indices()
            index = int(indices[random.integers(len(indices))]), int(random.integers(2**63))
        raise DataError(f"{_MAX_ATTEMPTS} samples in a row cannot be used. The last one: {errors[-1]}")


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    # Workers share the cores with each other and the training process; PyTorch limits its own threads itself.
    cv2.setNumThreads(0)
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_exit_without_passing_on)
    sys.excepthook = _print_unless_disconnected
    # Ctrl-C and schedulers signal every process of a run; without its workers it could not finish its step and save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_signal_of_trainer, daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the training process's handler, which a fork inherits
    # After the signal is blocked, since threads inherit that.
    threading.Thread(target=_exit_with_trainer, daemon=True).start()


def _exit_without_passing_on(error: Exception, _: Any) -> None:
    # Python would print the error and drop the batch, for which the trainer would then wait forever.
    print(f"a batch cannot be passed on by its loading process: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _print_unless_disconnected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A trainer that ends, as on SIGTERM, may leave a worker that is just passing it a batch.
    if not issubclass(kind, ConnectionError):
        sys.__excepthook__(kind, error, trace)


def _exit_with_trainer() -> None:
    # PyTorch's workers end with their parent, but with "forkserver" that is a process which outlives a killed trainer.
    multiprocessing.parent_process().join()
    os._exit(1)


def _exit_on_signal_of_trainer() -> None:
    trainer = multiprocessing.parent_process().pid  # not os.getppid(): "forkserver" puts a process in between
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


def leave_imported_main() -> None:
    """End this process if it is starting to load data and therefore imports the user's script, which calls this.

    Only "spawn" and "forkserver" import the script. Their parent says what to do, once for all its workers.
    """
    names = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in traceback.walk_stack(None))
    if ("__mp_main__", "<module>") in names:
        os._exit(_NO_MAIN_GUARD)


def lost_worker(error: BaseException) -> bool:
    """Return whether an error means that a loading process was killed; PyTorch may raise it anywhere."""
    reasons = ("killed by signal", "exited unexpectedly")
    text = str(error)
    return isinstance(error, RuntimeError) and "DataLoader worker" in text and any(r in text for r in reasons)


def check_batch(samples: Sequence[Sample]) -> None:
    """Check that images can be stacked, and that the labels of each target fit its boxes.

    Raises:
        DataError: they do not.
    """
    first = samples[0]["image"]
    for sample in samples:
        image, target = sample["image"], sample["target"]
        name = f"image {target.get('image_id')!r}"
        if image.dtype != first.dtype or (image.ndim == 3 and len(image) != len(first)):
            got, other = (f"{tuple(each.shape)} {each.dtype}" for each in (image, first))
            raise DataError(f"{name}: is {got}, and {other} is in its batch; expected the same type and channels.")
        if not {"labels", "boxes_cxcywh"} <= target.keys():
            continue
        labels, boxes = (torch.as_tensor(target[field]) for field in ("labels", "boxes_cxcywh"))
        is_tensor = isinstance(target["labels"], Tensor) and isinstance(target["boxes_cxcywh"], Tensor)
        if not is_tensor or labels.dtype != torch.int64 or boxes.shape != (*labels.shape, 4):
            got = f"labels {labels.dtype} {tuple(labels.shape)} and boxes_cxcywh {tuple(boxes.shape)}"
            raise DataError(f"{name}: its target has {got}; expected tensors int64 (N,) and (N, 4), also if N is 0.")
