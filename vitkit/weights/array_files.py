"""Reads weights published as array files (.npz, .pkl), without running code."""

import argparse
import pickle
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.errors import CheckpointError


class _Unread:
    """Placeholder for an object in a PyTorch file, such as a numpy array or number."""

    # Weights contain none, so nothing reads it.

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    append = extend = add = __setstate__


def _stand_in(module: str, name: str) -> type:
    return type(name, (_Unread,), {"__module__": module})


SAFE_GLOBALS = [
    argparse.Namespace,
    _stand_in("numpy", "ndarray"),
    _stand_in("numpy", "dtype"),
    *(_stand_in(f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
]
"""Types allowed in a weights-only read of a PyTorch file besides tensors and plain values: argparse settings (plain
values) in official training checkpoints; and numpy's numbers in fairseq's training statistics, which are left out."""


class _Rebuild:
    """One of PyTorch's functions that make tensors of stored values; without attributes that a file could set."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        self._name = name

    def __setstate__(self, state: Any) -> None:
        pass

    def __call__(self, *args: Any) -> Any:
        return getattr(torch._utils, self._name)(*args)


class _InertUnpickler(pickle.Unpickler):
    """Unpickles tensors, plain values and containers; what else a file names becomes a placeholder, never called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return _Rebuild(name)
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _stand_in(module, name)


inert_pickle = SimpleNamespace(Unpickler=_InertUnpickler, load=None, __name__="inert_pickle")
"""What `torch.load` unpickles a file with whose objects are not to be made."""


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of an .npz file by name, the format in which the original Vision Transformers are published.

    Raises:
        CheckpointError: it is damaged, or contains something other than numbers.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: _tensor(name, arrays[name]) for name in arrays.files}
    except Exception as error:  # a damaged file can make numpy raise anything, such as a MemoryError for a claimed size
        reason = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(
            f"{path}: damaged, or contains more than numbers ({reason}). Get the file again."
        ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays, numbers, text and containers, and calls nothing else, so that a file cannot run code."""

    ALLOWED = frozenset(
        (f"{package}.{module}", name)
        for package in ("numpy.core", "numpy._core")
        for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
    ) | {("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core") if _NUMPY_2 else module, name)


_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def read_pickled_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a .pkl file, as detectron2 publishes its models: {"model": {name: array}, ...}.

    Raises:
        CheckpointError: it is damaged, or contains something other than arrays, numbers and text.
    """
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file, encoding="latin1").load()
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: refused or damaged ({reason}). A .pkl file may contain only arrays, numbers and text: loading "
            "anything else could run code. Get the file again, or save its state dict with torch.save and load that."
        ) from error
    except Exception as error:  # a damaged file can make the unpickler raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise CheckpointError(
            f"{path}: truncated, damaged or not a file of arrays ({reason}). Get the file again."
        ) from error
    state = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not any(isinstance(value, np.ndarray) for value in state.values()):
        raise CheckpointError(f"{path}: has no arrays by name; expected a model of detectron2.")
    arrays = {str(name): value for name, value in state.items() if isinstance(value, np.ndarray)}
    bad = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
    if bad:
        dtype = arrays[bad[0]].dtype
        raise CheckpointError(f"{path}: {bad[0]} is not an array of numbers ({dtype}). Get the file again.")
    # Arrays may be saved by a machine with the other byte order, or by HDF5; torch only reads the native order.
    return {name: torch.from_numpy(array.astype(array.dtype.newbyteorder("="))) for name, array in arrays.items()}


def _tensor(name: str, array: Any) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is not an array")
    if array.dtype == np.dtype("V2"):  # numpy does not know bfloat16, which some arrays were saved in
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
