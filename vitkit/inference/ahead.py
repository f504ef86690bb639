"""Work of threads beside the model: reading pictures before it needs them, drawing and writing after it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int = 2, ahead: int = 4
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, computed by threads while others are taken or used.

    Memory is bounded: an item is taken only once fewer than `ahead` wait for their turn. It pays where the function
    lets other threads run, as decoding and encoding pictures, NumPy, OpenCV and PyTorch do.

    Args:
        workers: number of threads.
        ahead: most items whose results have not been yielded.
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
