"""From datasets to batches: settings, the order of the samples, worker processes.

The order and the random numbers of every sample follow from (seed, epoch, index) alone, so a run that stops in the
middle of an epoch continues with the very samples that it would have seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitkit.data.collate import collate
from vitkit.distributed import rank as current_rank
from vitkit.distributed import world_size as current_world_size
from vitkit.errors import ConfigError, DataError
from vitkit.registry import DATASETS, SECTIONS, Spec
from vitkit.structures import Batch, Sample

SeededIndex = tuple[int, int]
"""(position in the dataset, seed of the sample's transforms)."""


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
    aspect_ratio_grouping: bool = True
    """Upright and wide images do not share a training batch, which saves padding."""
    pin_memory: bool | None = None
    """Page-locked batches, which a GPU copies faster; None: when there is a GPU."""

    def __post_init__(self) -> None:
        for name, least in (("images_per_gpu", 1), ("val_images_per_gpu", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name}: got {getattr(self, name)}; expected at least {least}.")

    def train_loader(self, dataset: Any, seed: int) -> "Loader":
        """Shuffled batches of the training dataset for this rank; `seed` is the run's, the same on all ranks."""
        return build_loader(
            dataset,
            batch_size=self.images_per_gpu,
            training=True,
            seed=seed,
            num_workers=self.num_workers,
            aspect_ratio_grouping=self.aspect_ratio_grouping,
            pin_memory=self.pin_memory,
        )

    def val_loader(self, dataset: Any) -> "Loader":
        """Every image of the validation dataset once over all ranks."""
        return build_loader(
            dataset,
            batch_size=self.val_images_per_gpu,
            training=False,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
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


class TrainBatches:
    """Which samples make each training batch of this rank, epoch by epoch.

    An epoch has every image at least once, in an order drawn from (seed, epoch). All ranks have the same number of
    batches; where the images do not fill the last ones, some come again with other random numbers.

    Args:
        num_images: of the dataset.
        batch_size: images per rank.
        seed: of the run, the same on all ranks.
        groups: (num_images,) int; a batch holds images of one group only. None: all are one group.
        rank, world_size: of this process.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        seed: int,
        groups: np.ndarray | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.batch_size = batch_size
        self.seed = seed
        self.groups = np.zeros(num_images, np.int64) if groups is None else groups
        self.rank = rank
        self.world_size = world_size
        self.set_position(0)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """The next iteration starts at batch `batch` of epoch `epoch`; what is skipped is not loaded."""
        self.epoch = epoch
        self.first_batch = batch

    def __len__(self) -> int:
        _, sizes = np.unique(self.groups, return_counts=True)
        return -(-int((-(-sizes // self.batch_size)).sum()) // self.world_size)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        indices, repeats = self._epoch_order()
        for number in range(self.first_batch, len(self)):
            row = number * self.world_size + self.rank
            yield [
                (int(index), _sample_seed(self.seed, self.epoch, int(index), int(repeat)))
                for index, repeat in zip(indices[row], repeats[row])
            ]

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray]:
        """For all ranks: indices (batches, batch_size), and how often each index came before."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(len(self.groups))
        batches = []
        for group in np.unique(self.groups):
            members = order[self.groups[order] == group]
            num_batches = -(-len(members) // self.batch_size)
            # np.resize repeats from the start.
            batches.append(np.resize(members, (num_batches, self.batch_size)))
        indices = random.permutation(np.concatenate(batches))
        indices = np.resize(indices, (len(self) * self.world_size, self.batch_size))
        flat = indices.ravel()
        by_index = np.argsort(flat, kind="stable")
        _, first, inverse = np.unique(flat[by_index], return_index=True, return_inverse=True)
        repeats = np.empty_like(flat)
        repeats[by_index] = np.arange(len(flat)) - first[inverse]
        return indices, repeats.reshape(indices.shape)


class EvalBatches:
    """Every image once over all ranks, in order: no image is repeated to fill a batch, which would count it twice."""

    def __init__(self, num_images: int, *, batch_size: int, rank: int = 0, world_size: int = 1):
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        for start in range(0, len(self.indices), self.batch_size):
            # A fixed seed: should the transforms be random, each evaluation still sees the same images.
            yield [(index, index) for index in self.indices[start : start + self.batch_size]]


def _sample_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


class Loader:
    """Batches of a dataset, loaded in worker processes. Iterating gives one epoch.

    Args:
        dataset: see `Dataset` in vitkit.data; `dataset[(index, seed)]` gives a Sample.
        batches: TrainBatches or EvalBatches.
        num_workers: processes; 0 loads in this one.
        pin_memory: see DataSettings.
        keep_workers: between epochs.
        size_divisor: see `collate`.
    """

    def __init__(
        self,
        dataset: Any,
        batches: TrainBatches | EvalBatches,
        *,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        keep_workers: bool = False,
        size_divisor: int = 1,
    ):
        self.dataset = dataset
        self.batches = batches
        self._loader = DataLoader(
            _BatchedDataset(dataset, size_divisor),
            batch_sampler=batches,
            collate_fn=_identity,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            persistent_workers=keep_workers and num_workers > 0,
            worker_init_fn=_start_worker,
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
        for batch in self._loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Before the iteration: which epoch it gives, and how many of its batches to skip without loading them."""
        self.batches.set_position(epoch, batch)


class _BatchedDataset(Dataset):
    """Loads and collates a whole batch in the worker."""

    def __init__(self, dataset: Any, size_divisor: int):
        self.dataset = dataset
        self.size_divisor = size_divisor

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[SeededIndex]) -> Batch | DataError:
        try:
            samples: list[Sample] = [self.dataset[index] for index in indices]
        except DataError as error:
            # Raised in a worker, it would reach the user inside a traceback as text.
            return error
        return collate(samples, size_divisor=self.size_divisor)


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    # Workers share the cores with each other and the training process; PyTorch limits its own threads by itself.
    cv2.setNumThreads(0)


def build_loader(
    dataset: Any,
    *,
    batch_size: int,
    training: bool,
    seed: int = 0,
    num_workers: int = 0,
    aspect_ratio_grouping: bool = True,
    pin_memory: bool | None = None,
    size_divisor: int = 1,
) -> Loader:
    """The loader of this rank.

    Args:
        dataset: see `Loader`; with aspect_ratio_grouping it has `aspect_ratios()`.
        batch_size: images per rank.
        training: shuffled, grouped, as many batches on every rank; otherwise every image once over all ranks.
        seed, num_workers, aspect_ratio_grouping, pin_memory, size_divisor: see DataSettings, TrainBatches, collate.
    """
    ranks = {"rank": current_rank(), "world_size": current_world_size()}
    if training:
        groups = (dataset.aspect_ratios() >= 1).astype(np.int64) if aspect_ratio_grouping else None
        batches = TrainBatches(len(dataset), batch_size=batch_size, seed=seed, groups=groups, **ranks)
    else:
        batches = EvalBatches(len(dataset), batch_size=batch_size, **ranks)
    return Loader(
        dataset,
        batches,
        num_workers=num_workers,
        pin_memory=pin_memory,
        keep_workers=training,
        size_divisor=size_divisor,
    )


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
