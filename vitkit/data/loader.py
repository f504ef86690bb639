"""From datasets to loaded batches: settings, worker processes and their faults."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.data.batches import EvalBatches, SeededIndex, TokenBatches, TrainBatches
from vitkit.data.collate import collate
from vitkit.data.sampling import Sampler, image_weights
from vitkit.distributed import rank as current_rank
from vitkit.distributed import world_size as current_world_size
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS, SECTIONS, Spec
from vitkit.structures import Batch, Sample

logger = logging.getLogger("vitkit")
_MOST_NAMED = 20
_MOST_ATTEMPTS = 10


@SECTIONS.register(name="data")
@dataclass
class DataSettings:
    """The config's `data` section."""

    train: Spec | None = None
    """The training dataset; `{root}` in its strings stands for `root`."""
    val: Spec | None = None
    """The dataset that is evaluated on, likewise."""
    root: str = "data"
    """Folder of the data."""
    images_per_gpu: int = 2
    val_images_per_gpu: int = 1
    """1: no image is padded, so results depend neither on which images share a batch nor on the number of ranks."""
    num_workers: int = 2
    """Loading processes per rank; 0 loads in the training process."""
    tokens_per_gpu: int | None = None
    """Of text, in place of both numbers of images: a batch's tokens at most, padding included, on each of its sides."""
    aspect_ratio_grouping: bool = True
    """Upright and wide images do not share a training batch, which saves padding."""
    pin_memory: bool | None = None
    """Page-locked batches, which a GPU copies faster; None: when there is a GPU."""
    on_error: Literal["raise", "skip"] = "raise"
    """What a file that cannot be used does to training: end it, or be named and replaced by another image, drawn from
    the sample's seed. Evaluation always ends: without some images its numbers would not compare."""
    sampler: Sampler | None = None
    """How often images come in an epoch: "repeat_factor" repeats those of rare classes, with "class_aware" all classes
    come equally often (see vitkit.data.sampling); None: all images once."""
    repeat_threshold: float = 0.001
    """Of "repeat_factor": the share of images below which a class is rare."""
    start_workers: Literal["fork", "spawn", "forkserver"] | None = None
    """How worker processes begin; None: as the system does by default."""

    def __post_init__(self) -> None:
        for name, least in (("images_per_gpu", 1), ("val_images_per_gpu", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name}: got {getattr(self, name)}; expected at least {least}.")
        if not 0 < self.repeat_threshold <= 1:
            raise ConfigError(f"data.repeat_threshold: got {self.repeat_threshold}; expected above 0, at most 1.")
        if self.sampler is not None and self.tokens_per_gpu is not None:
            raise ConfigError("data.sampler: is for images; leave it out with data.tokens_per_gpu.")
        if self.tokens_per_gpu is not None and self.tokens_per_gpu < 1:
            raise ConfigError(f"data.tokens_per_gpu: got {self.tokens_per_gpu}; expected at least 1.")

    @property
    def batch_size_per_gpu(self) -> int:
        """What a training batch holds: images, or of text tokens."""
        return self.tokens_per_gpu or self.images_per_gpu

    def train_loader(self, dataset: Any, seed: int) -> "Loader":
        """Shuffled batches of the training dataset for this rank; `seed` is the run's, the same on all ranks."""
        return build_loader(
            dataset,
            batch_size=self.images_per_gpu,
            batch_tokens=self.tokens_per_gpu,
            training=True,
            seed=seed,
            num_workers=self.num_workers,
            aspect_ratio_grouping=self.aspect_ratio_grouping,
            pin_memory=self.pin_memory,
            on_error=self.on_error,
            weights=self._weights(dataset),
            start_workers=self.start_workers,
        )

    def _weights(self, dataset: Any) -> np.ndarray | None:
        if self.sampler is None:
            return None
        return image_weights(dataset, self.sampler, repeat_threshold=self.repeat_threshold)

    def val_loader(self, dataset: Any) -> "Loader":
        """Every image of the validation dataset once over all ranks."""
        return build_loader(
            dataset,
            batch_size=self.val_images_per_gpu,
            batch_tokens=self.tokens_per_gpu,
            training=False,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            start_workers=self.start_workers,
        )


def build_dataset(spec: Spec, root: str = "data", *, where: str = "data") -> Any:
    """Builds a dataset.

    Args:
        spec: of a registered dataset.
        root: what replaces `{root}` in the spec's strings.
        where: the spec's config key, named in errors ("data.train").
    """
    if isinstance(spec, Mapping):
        spec = {key: value.replace("{root}", root) if isinstance(value, str) else value for key, value in spec.items()}
    try:
        return DATASETS.build(spec)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class Loader:
    """Batches of a dataset, loaded in worker processes. Iterating gives one epoch.

    Args:
        dataset: see `Dataset` in vitkit.data; `dataset[(index, seed)]` gives a Sample. Its own `collate(samples,
            size_divisor=…)`, if it has one, makes the batches.
        batches: TrainBatches, EvalBatches or TokenBatches.
        num_workers: processes; 0 loads in this one.
        pin_memory: see DataSettings.
        keep_workers: between epochs.
        size_divisor: see `collate`.
        on_error: see DataSettings; `num_skipped` counts.
        start_workers: see DataSettings.
    """

    def __init__(
        self,
        dataset: Any,
        batches: TrainBatches | EvalBatches | TokenBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        keep_workers: bool = False,
        size_divisor: int = 1,
        on_error: Literal["raise", "skip"] = "raise",
        start_workers: Literal["fork", "spawn", "forkserver"] | None = None,
    ):
        self.dataset = dataset
        self.batches = batches
        self.num_skipped = 0
        """Samples of this rank that were replaced, because their files cannot be used."""
        self._loader = DataLoader(
            _BatchedDataset(dataset, size_divisor, skips=on_error == "skip"),
            batch_sampler=batches,
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            persistent_workers=keep_workers and num_workers > 0,
            worker_init_fn=_start_worker,
            multiprocessing_context=start_workers if num_workers > 0 else None,
            # Its own generator: from the global one it would draw a number per epoch, and a resumed run, which starts
            # one more iteration, would no longer repeat the run that was stopped.
            generator=torch.Generator().manual_seed(0),
        )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """
        Raises:
            DataError: an image of the batch is missing or wrong.
        """
        for loaded in self._loader:
            if isinstance(loaded, DataError):
                raise loaded
            batch, faults = loaded
            for fault in faults:
                self._count_skipped(fault)
            yield batch

    def _count_skipped(self, fault: str) -> None:
        self.num_skipped += 1
        if self.num_skipped <= _MOST_NAMED:
            more = " Those to come are only counted." if self.num_skipped == _MOST_NAMED else ""
            # An error, as ranks other than the main one print nothing less, and each sees other files.
            logger.error("%s Another image takes its place (data.on_error=skip); %d so far.%s",
                         fault, self.num_skipped, more)  # fmt: skip

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Before the iteration: which epoch it gives, and how many of its batches to skip without loading them."""
        self.batches.set_position(epoch, batch)


class _BatchedDataset(Dataset):
    """Loads and collates a whole batch in the worker."""

    def __init__(self, dataset: Any, size_divisor: int, *, skips: bool):
        self.dataset = dataset
        self.size_divisor = size_divisor
        self.skips = skips

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[SeededIndex]) -> tuple[Batch, list[str]] | DataError:
        faults: list[str] = []
        try:
            samples = [self._sample(index, faults) for index in indices]
        except DataError as error:
            # Raised in a worker, it would reach the user inside a traceback as text.
            return error
        join = getattr(self.dataset, "collate", collate)
        return join(samples, size_divisor=self.size_divisor), faults

    def _sample(self, index: SeededIndex, faults: list[str]) -> Sample:
        """The sample; or one in its place, which follows from its seed, with what was wrong added to `faults`."""
        for attempt in range(_MOST_ATTEMPTS):
            try:
                return self.dataset[index]
            except DataError as error:
                if not self.skips:
                    raise
                faults.append(str(error))
            random = np.random.default_rng([index[1], attempt])
            index = int(random.integers(len(self.dataset))), int(random.integers(2**63))
        raise DataError(f"{_MOST_ATTEMPTS} images in a row cannot be used. The last one: {faults[-1]}")


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    # Workers share the cores with each other and the training process; PyTorch limits its own threads by itself.
    cv2.setNumThreads(0)
    # Ctrl-C and schedulers signal every process of a run; without its workers it could not end its step and be saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # Linux
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_the_trainer_says, daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handler, which a fork inherits


def _end_when_the_trainer_says() -> None:
    trainer = multiprocessing.parent_process().pid  # under "forkserver" it is not what the system calls the parent
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)


def build_loader(
    dataset: Any,
    *,
    batch_size: int,
    batch_tokens: int | None = None,
    training: bool,
    seed: int = 0,
    num_workers: int = 0,
    aspect_ratio_grouping: bool = True,
    pin_memory: bool | None = None,
    size_divisor: int = 1,
    on_error: Literal["raise", "skip"] = "raise",
    weights: np.ndarray | None = None,
    start_workers: Literal["fork", "spawn", "forkserver"] | None = None,
) -> Loader:
    """The loader of this rank.

    Args:
        dataset: see `Loader`; with aspect_ratio_grouping it may have `aspect_ratios()`, with batch_tokens `lengths()`.
        batch_size: images per rank.
        batch_tokens: if given, batches are made by TokenBatches in place of `batch_size`.
        training: shuffled, grouped, as many batches on every rank; otherwise every image once over all ranks.
        weights: of a training loader, see TrainBatches.
        seed, num_workers, aspect_ratio_grouping, pin_memory, size_divisor, on_error, start_workers: see DataSettings,
            TrainBatches, collate.
    """
    ranks = {"rank": current_rank(), "world_size": current_world_size()}
    if batch_tokens is not None:
        batches = TokenBatches(_lengths_of(dataset), batch_tokens=batch_tokens, training=training, seed=seed, **ranks)
    elif training:
        grouped = aspect_ratio_grouping and hasattr(dataset, "aspect_ratios")  # text has none
        groups = (dataset.aspect_ratios() >= 1).astype(np.int64) if grouped else None
        batches = TrainBatches(len(dataset), batch_size=batch_size, seed=seed, groups=groups, weights=weights, **ranks)
    else:
        batches = EvalBatches(len(dataset), batch_size=batch_size, **ranks)
    return Loader(
        dataset,
        batches,
        num_workers=num_workers,
        pin_memory=pin_memory,
        keep_workers=training,
        size_divisor=size_divisor,
        on_error=on_error,
        start_workers=start_workers,
    )


def lost_worker(error: BaseException) -> bool:
    """Whether a loading process was killed, which PyTorch tells wherever the program then is."""
    ends = ("killed by signal", "exited unexpectedly")
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error) and any(e in str(error) for e in ends)


def _lengths_of(dataset: Any) -> np.ndarray:
    if not hasattr(dataset, "lengths"):
        raise ConfigError(
            f"data.tokens_per_gpu: {type(dataset).__name__} has no text to count tokens of. Set data.images_per_gpu."
        )
    return dataset.lengths()


def check_same_classes(train: Any, val: Any) -> None:
    """
    Raises:
        DataError: the two datasets do not have the same classes under the same ids.
    """
    ours, theirs = (dict(zip(dataset.category_ids, dataset.classes)) for dataset in (train, val))
    if ours != theirs:
        different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        raise DataError(
            f"data.train has {len(ours)} classes and data.val has {len(theirs)}; they differ at id {different[0]}: "
            f"{ours.get(different[0])!r} and {theirs.get(different[0])!r}. Both files need the same categories."
        )
