"""Collective operations of a run's processes; every function also works without a process group."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitkit.errors import VitkitError

logger = logging.getLogger("vitkit")

Item = TypeVar("Item")


def idle_devices(device: torch.device) -> int:
    """Return the number of further accelerators of a device's type, if this process is the only one."""
    if world_size() > 1 or device.type in ("cpu", "mps"):
        return 0
    return torch.get_device_module(device).device_count() - 1


def rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the one process that writes files and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def all_reduce_sum(value: Tensor) -> Tensor:
    """Return the sum over all ranks of a tensor that has the same shape on each."""
    if world_size() == 1:
        return value
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def all_reduce_mean(value: Tensor) -> Tensor:
    """Return the mean over all ranks of a tensor that has the same shape on each."""
    return all_reduce_sum(value) / world_size()


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest type in which a device sums: Apple's GPU has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class RatioMeter:
    """A ratio of two sums, such as correct predictions over all predictions. Adding never waits for the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, numerator: Tensor, denominator: Tensor) -> None:
        """Add two scalars to the sums; both are skipped if one is not finite, as in a batch with a non-finite loss."""
        dtype = accumulation_dtype(numerator.device)
        pair = torch.stack([value.detach().to(numerator.device, dtype) for value in (numerator, denominator)])
        pair = pair.where(pair.isfinite().all(), 0)
        self._sums = pair if self._sums is None else self._sums + pair

    def compute(self, device: torch.device | str = "cpu") -> tuple[float, int]:
        """Return the ratio over all ranks and its denominator; (nan, 0) when nothing was added anywhere.

        Args:
            device: the process group's device, for a rank that has added nothing yet.
        """
        dtype = accumulation_dtype(torch.device(device))
        sums = self._sums if self._sums is not None else torch.zeros(2, dtype=dtype, device=device)
        numerator, denominator = all_reduce_sum(sums).tolist()
        return (numerator / denominator if denominator else float("nan")), int(denominator)

    def reset(self) -> None:
        """Reset both sums to zero."""
        self._sums = None

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return this rank's sums."""
        return {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Restore what `state_dict` returned."""
        self._sums = state["sums"]


def gather_objects(item: object) -> list:
    """Return the items of all ranks in rank order, on the main process; an empty list elsewhere.

    Items are pickled for the transfer, which is only between processes of this run.
    """
    if world_size() == 1:
        return [item]
    items = [None] * world_size() if is_main() else None
    dist.gather_object(item, items)
    return items if is_main() else []


def gather_dicts(entries: Mapping[Any, Any], *, at_once: int = 32) -> dict[Any, Any]:
    """Return the entries of all ranks in one dict, on the main process; an empty dict elsewhere.

    A key that several ranks have is kept once. Entries are sent in rounds, so that the main process never holds more
    than a few entries of each rank in addition to the result; with NCCL they pass through the GPU's memory.

    Args:
        at_once: number of entries that each rank sends in a round.
    """
    numbers = broadcast_object(gather_objects(len(entries)))
    remaining, merged = iter(entries.items()), {}
    for _ in range(0, max(numbers), at_once):
        for part in gather_objects(dict(islice(remaining, at_once))):
            merged.update((key, part[key]) for key in part.keys() - merged.keys())
    return merged


@contextmanager
def failing_together() -> Iterator[None]:
    """Raise an error that a user can cause, in this block of any rank, on all ranks: none waits for an ended one.

    The block must not wait for other ranks, and all ranks must enter it.

    Raises:
        VitkitError: the error of this rank; or, of the same class, that of the first other rank that has one.
    """
    error = None
    try:
        yield
    except VitkitError as caught:
        error = caught
    of_rank = None if error is None else (type(error), str(error))
    per_rank = broadcast_object(gather_objects(of_rank))
    if error is not None:
        raise error
    for number, other in enumerate(per_rank):
        if other is not None:
            raise other[0](f"rank {number}: {other[1]}")


def broadcast(value: Tensor) -> None:
    """Overwrite a tensor with that of the main process, which has the same shape."""
    if world_size() > 1:
        dist.broadcast(value, 0)


@contextmanager
def first_rank_first() -> Iterator[None]:
    """Let one process per machine run the block before the others, for example to download a file for all of them."""
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if not is_first:
        barrier()
    try:
        yield
    finally:
        if is_first:
            barrier()


def broadcast_object(item: Item) -> Item:
    """Return the main process's item on every rank."""
    if world_size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box)
    return box[0]
