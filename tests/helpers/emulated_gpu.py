"""A GPU that is emulated on the CPU, to count where a program would wait for it.

A tensor of this device claims to be on "cuda:0" but holds a CPU tensor, on which operators are computed. All operators,
including those of the backward pass, are intercepted, so that those with which a real GPU and the program wait for each
other are counted: values or shapes that the program reads, and copies between devices that are not asynchronous. They
are what `torch.cuda.set_sync_debug_mode` reports on a real GPU.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

PACKAGE = f"{Path(__file__).resolve().parents[2] / 'vitkit'}{os.sep}"

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
SHAPES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount}


class OnDevice(Tensor):
    """A tensor of the emulated device; `held` has its values, and `is_number` is whether it is a number of Python."""

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )

    def __init__(self, held: Tensor):
        self.held, self.is_number = held, False

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} of a tensor that has left its device")


class EmulatedGPU(TorchDispatchMode):
    """Runs operators, and counts those that wait in `waits`, by the operator and the line of vitkit that called it."""

    def __init__(self):
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        from_device = any(isinstance(leaf, OnDevice) for leaf in leaves)
        if from_device and any(type(leaf) is Tensor and leaf.is_meta for leaf in leaves):
            raise AssertionError(f"{function}: a tensor without values")
        operator = function.overloadpacket
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
            target = torch.device(target).type in ("cuda", "meta")
        self._count(operator, args, kwargs, from_device=from_device, to_device=target)
        args, kwargs = tree_map_only(OnDevice, lambda x: x.held, (args, kwargs))
        result = function(*args, **kwargs)
        on_device = from_device if target is None else target
        if not on_device:
            return result
        if operator is aten.scalar_tensor:
            result = OnDevice(result)
            result.is_number = True
            return result
        # A tensor that an operator changes in place must stay the same object.
        held = {id(leaf.held): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
        return tree_map_only(Tensor, lambda x: held[id(x)] if id(x) in held else OnDevice(x), result)

    def _count(self, operator, args, kwargs, *, from_device: bool, to_device: bool | None) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if tensor.ndim and not isinstance(tensor, OnDevice)]
        if operator is aten._to_copy and to_device is not None and to_device != from_device:
            if not (to_device and kwargs.get("non_blocking")):
                self.note("copy to the device" if to_device else "copy from the device")
        elif operator is aten.copy_:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            if isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice) and not (
                non_blocking and isinstance(args[0], OnDevice)
            ):
                self.note("copy")
            # torch fills a slice with a number, but copies it from the host to single elements.
            elif args[0].ndim == 0 and _is_number(args[1]):
                self.note("number to an element")
        elif not from_device:
            return
        elif operator in READS or operator in SHAPES:
            self.note(str(operator))
        elif operator is aten.repeat_interleave and kwargs.get("output_size") is None and len(tensors) > 0:
            self.note("repeat_interleave without output_size")
        elif operator in (aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index):
            indices = [index for index in args[1] if index is not None]
            if not isinstance(args[0], OnDevice) or any(x is value for x in on_host for value in args[2:3]):
                raise AssertionError(f"{operator}: tensors of two devices")
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.note("index by a mask")
            elif not all(isinstance(index, OnDevice) for index in indices):
                self.note("index from the host")
            elif len(args) > 2 and _is_number(args[2]):
                self.note("number to elements")
        elif on_host:
            raise AssertionError(f"{operator}: tensors of two devices")

    def note(self, what: str) -> None:
        """Count a wait."""
        frame = sys._getframe()
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "torch"
        self.waits[f"{where} {what}"] += 1


def _is_number(x: Tensor) -> bool:
    return isinstance(x, OnDevice) and x.is_number


class _Factories(TorchFunctionMode):
    """Makes tensors from Python numbers, which torch does before operators reach the other mode."""

    def __init__(self, gpu: EmulatedGPU):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is Tensor.new_tensor and isinstance(args[0], OnDevice):
            kwargs.setdefault("dtype", args[0].dtype)
            function, args, kwargs["device"] = torch.tensor, args[1:], DEVICE
        if function in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            del kwargs["device"]
            self.gpu.note("tensor of numbers")
            return OnDevice(function(*args, **kwargs))
        if function in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OnDevice):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            # torch would move a list of indices to the device without an operator.
            indices = tuple(torch.tensor(index) if isinstance(index, list) else index for index in indices)
            args = (args[0], indices, *args[2:])
        if function is Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].cpu().tolist()
        return function(*args, **kwargs)


@contextmanager
def emulated_gpu() -> Iterator[EmulatedGPU]:
    """Compute on the emulated device inside this context."""
    gpu = EmulatedGPU()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        stack.enter_context(mock.patch("torch.cuda._lazy_init"))
        # A view of a parameter, which is not a tensor of inference, cannot be wrapped in inference mode.
        stack.enter_context(mock.patch("torch._C._InferenceMode", lambda mode: torch.set_grad_enabled(not mode)))
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(_Factories(gpu))
        stack.enter_context(gpu)
        yield gpu


def to_device(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module's parameters and buffers, in place."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(OnDevice(parameter.detach()), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module
