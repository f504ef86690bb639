"""Threads that work while the model runs: they read images ahead, and draw and write results."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int = 2, ahead: int = 4
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order; threads compute the next results while the caller uses one.

    Memory is bounded: a new item is taken only when fewer than `ahead` results wait to be yielded. This pays off where
    the function releases the GIL, as decoding and encoding images, NumPy, OpenCV and PyTorch do.

    Args:
        workers: number of threads.
        ahead: the maximum number of items whose results have not been yielded.
    Raises:
        whatever `function` raises, when the item's turn comes.
    """
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
