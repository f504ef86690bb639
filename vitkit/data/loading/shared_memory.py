"""Arrays that worker processes share with the training process, however they are started."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class SharedArray(np.ndarray):
    """An array that worker processes share; its slices and elements are ordinary arrays.

    Forked processes share all memory. For processes started otherwise, PyTorch copies the bytes once to shared memory
    that all of them map, so nothing may write to the array. Pickled for any other purpose it becomes an ordinary array.
    """

    def __array_finalize__(self, source: Any) -> None:
        self._bytes: Tensor | None = None  # results of computations are not shared

    def __getitem__(self, index: Any) -> Any:
        return self.view(np.ndarray)[index]

    def __reduce__(self) -> tuple:
        if self._bytes is None:
            return np.array(self, subok=False).__reduce__()
        return _receive, (self._bytes, self.dtype, self.shape)


def share(array: np.ndarray) -> np.ndarray:
    """Return an array with the same numbers that worker processes share; empty arrays are returned as is."""
    if not array.nbytes:
        return array
    shared = np.array(array, order="C").view(SharedArray)
    shared._bytes = torch.from_numpy(shared.view(np.ndarray).reshape(-1).view(np.uint8))
    return shared


def share_arrays(dataset: Any) -> None:
    """Make all array attributes of a dataset arrays that worker processes share."""
    for name, value in vars(dataset).items():
        if isinstance(value, np.ndarray):
            setattr(dataset, name, share(value))


def _receive(data: Tensor, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return data.numpy().view(dtype).reshape(shape)
