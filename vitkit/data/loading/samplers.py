"""Batch samplers: the indices and seeds of each batch's samples, on each rank.

The order and the random numbers of every sample depend only on (seed, epoch, index), so a run that is interrupted in
the middle of an epoch resumes with exactly the samples that it would have seen.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass

import numpy as np

from vitkit.data.loading.image_weights import draw
from vitkit.errors import DataError

SeededIndex = tuple[int, int]
"""(index in the dataset, seed of the sample's transforms)."""
WINDOW_BLOCKS = 256
"""Blocks of a pack among whose images an epoch's order is random: 1 GiB, some thousand photos."""


@dataclass(eq=False, repr=False)
class TrainBatches:
    """Training batches of this rank.

    An epoch has every image at least once, or as often as its weight and `repeats` say, in an order drawn from
    (seed, epoch). All ranks have the same number of batches; if there are too few images to fill the last ones, images
    are repeated with different random numbers.

    With `blocks`, the order is one of blocks: `WINDOW_BLOCKS` of them, drawn at random, are read at a time, and their
    images shuffled. What is read in one piece is then used in a short time, and a cache need not hold more than that.

    Args:
        num_images: size of the dataset.
        batch_size: images per batch on each rank.
        seed: the run's seed, the same on all ranks.
        groups: (num_images,) int group of each image; a batch holds images of one group only. None: all are one group.
        weights: (num_images,) average number of times that each image occurs in an epoch. None: once.
        blocks: (num_images,) int64 number of the block of a pack that holds each image; None: images are files.
        repeats: how often an epoch's images occur in it, in a row; it is as long as without, with fewer images.
        batches_per_step: of each rank; an epoch then consists of complete steps, and what a step trains on is the same
            for any number of ranks with the same `world_size * batches_per_step`.
        rank, world_size: those of this process.
    """

    num_images: InitVar[int]
    _: KW_ONLY
    batch_size: int
    seed: int
    groups: np.ndarray | None = None
    weights: np.ndarray | None = None
    blocks: InitVar[np.ndarray | None] = None
    repeats: int = 1
    batches_per_step: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self, num_images: int, blocks: np.ndarray | None):
        self.groups = np.zeros(num_images, np.int64) if self.groups is None else self.groups
        self._blocks = None if blocks is None else np.unique(blocks, return_inverse=True)[1]
        group_ids, counts = np.unique(self.groups, return_counts=True)
        if self.weights is not None:
            sums = np.bincount(self.groups, self.weights)[group_ids]
            counts = np.maximum(np.rint(sums), sums > 0).astype(np.int64)  # a small sum is drawn too often, not never
        # The same in every epoch: learning-rate schedules rely on it.
        self._group_sizes = {group: count for group, count in zip(group_ids.tolist(), counts.tolist()) if count}
        self.set_position(0)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Start the next iteration at batch `batch` of epoch `epoch`; skipped batches are not loaded."""
        self.epoch = epoch
        self.first_batch = batch

    def __len__(self) -> int:
        num_batches = sum(-(-size // self.batch_size) for size in self._group_sizes.values())
        return -(-num_batches // (self.world_size * self.batches_per_step)) * self.batches_per_step

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        indices, occurrences = self._epoch_order()
        for number in range(self.first_batch, len(self)):
            row = number * self.world_size + self.rank
            yield [
                (int(index), _sample_seed(self.seed, self.epoch, int(index), int(occurrence)))
                for index, occurrence in zip(indices[row], occurrences[row])
            ]

    def _epoch_order(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of all ranks, (batches, batch_size), and how often each occurred earlier in the epoch."""
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(len(self.groups))
        windows = self._windows()
        batches = []
        for group, size in self._group_sizes.items():
            members = order[self.groups[order] == group]
            if self.weights is not None:
                members = draw(members, self.weights[members], size, random)
            # Stable: within a window, the order stays the random one.
            members = members[np.argsort(windows[members], kind="stable")]
            members = np.repeat(members, self.repeats)[: len(members)]
            num_batches = -(-len(members) // self.batch_size)
            # np.resize repeats from the start.
            batches.append(np.resize(members, (num_batches, self.batch_size)))
        indices = random.permutation(np.concatenate(batches))
        indices = indices[np.argsort(windows[indices[:, 0]], kind="stable")]
        indices = np.resize(indices, (len(self) * self.world_size, self.batch_size))
        flat = indices.ravel()
        by_index = np.argsort(flat, kind="stable")
        _, starts, inverse = np.unique(flat[by_index], return_index=True, return_inverse=True)
        occurrences = np.empty_like(flat)
        occurrences[by_index] = np.arange(len(flat)) - starts[inverse]
        return indices, occurrences.reshape(indices.shape)

    def _windows(self) -> np.ndarray:
        """Return the window of the epoch that each image belongs to, (num_images,) int64; all 0 without blocks."""
        if self._blocks is None:
            return np.zeros(len(self.groups), np.int64)
        # A generator of its own: data of one window have the order that they have as files.
        random = np.random.default_rng([self.seed, self.epoch, 1])
        return random.permutation(self._blocks.max(initial=-1) + 1)[self._blocks] // WINDOW_BLOCKS


class EvalBatches:
    """Evaluation batches of this rank: every image exactly once over all ranks, in order."""

    def __init__(self, num_images: int, *, batch_size: int, rank: int = 0, world_size: int = 1):
        # Ranks may have different numbers of images: one that is repeated to even them out would count twice.
        self.indices = range(rank, num_images, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        for start in range(0, len(self.indices), self.batch_size):
            # A fixed seed: even with random transforms, every evaluation sees the same images.
            yield [(index, index) for index in self.indices[start : start + self.batch_size]]


@dataclass(eq=False, repr=False)
class TokenBatches:
    """Batches of sentences of similar length for this rank, as large as a maximum number of tokens allows.

    In training, an epoch's order is drawn from (seed, epoch): sentences of equal length are grouped at random, and the
    batches are in random order. All ranks have the same number of batches in every epoch; if necessary, the last
    batches repeat others. In evaluation, every sentence occurs once over all ranks, the longest first.

    Args:
        lengths: (num_sentences, sides) int, number of tokens on each side of a sentence pair.
        batch_tokens: maximum number of tokens in a batch on each side, padding included.
        training: whether batches are for training or evaluation, as described above.
        seed: the run's seed, the same on all ranks.
        rank, world_size: those of this process.
    Raises:
        DataError: a sentence is longer than `batch_tokens`.
    """

    lengths: InitVar[np.ndarray]
    _: KW_ONLY
    batch_tokens: InitVar[int]
    training: bool
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self, lengths: np.ndarray, batch_tokens: int):
        self.longest = lengths.max(axis=1)
        if self.longest.max() > batch_tokens:
            raise DataError(
                f"data.tokens_per_gpu={batch_tokens}: a sentence has {self.longest.max()} tokens, which do not fit in "
                "a batch. Raise it, or lower the dataset's max_length."
            )
        # Batch boundaries depend only on the sorted lengths, which are the same in every epoch.
        self._starts = _token_batch_starts(np.sort(self.longest)[::-1], batch_tokens)
        self.set_position(0)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        self.epoch, self.first_batch = epoch, batch

    def __len__(self) -> int:
        num_batches = len(self._starts)
        if self.training:
            return -(-num_batches // self.world_size)
        return len(range(self.rank, num_batches, self.world_size))

    def __iter__(self) -> Iterator[list[SeededIndex]]:
        batches = self._training_order() if self.training else self._batches(np.arange(len(self.longest)))
        for number in range(self.first_batch, len(self)):
            indices = batches[(number * self.world_size + self.rank) % len(batches)].tolist()
            seeds = [_sample_seed(self.seed, self.epoch, index) if self.training else index for index in indices]
            yield list(zip(indices, seeds))

    def _training_order(self) -> list[np.ndarray]:
        random = np.random.default_rng([self.seed, self.epoch])
        batches = self._batches(random.permutation(len(self.longest)))
        return [batches[number] for number in random.permutation(len(batches))]

    def _batches(self, order: np.ndarray) -> list[np.ndarray]:
        """Split the sentences into batches, sorted by length; sentences of equal length keep their order."""
        by_length = order[np.argsort(-self.longest[order], kind="stable")]
        return np.split(by_length, self._starts[1:])


def _token_batch_starts(descending: np.ndarray, batch_tokens: int) -> list[int]:
    """Return the start of each batch, filling it with as many sentences as fit when padded to its first and longest."""
    starts, start = [], 0
    while start < len(descending):
        starts.append(start)
        start += max(1, batch_tokens // int(descending[start]))
    return starts


def _sample_seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
