"""Transforms of whole batches, on the model's device."""

from collections.abc import Callable, Iterable, Iterator

import torch

from vitkit.structures import Batch


class TransformedLoader:
    """A `Loader` whose batches are moved to the device and transformed there."""

    def __init__(self, loader: Iterable[Batch], transform: Callable[[Batch], Batch], device: torch.device):
        self.loader = loader
        self.transform = transform
        self.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield self.transform(batch.to(self.device))

    @property
    def num_skipped(self) -> int:
        return self.loader.num_skipped

    @property
    def num_padded(self) -> int:
        return self.loader.num_padded

    def set_position(self, epoch: int, batch: int = 0) -> None:
        self.loader.set_position(epoch, batch)
