"""Count and measure the costs of a model by part: parameters, memory, time.

A part is a module, named by its dotted name, with all of its submodules; "" is the full model.
"""

import math
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.apps.analysis.macs import track_running_modules
from vitkit.devices import synchronize
from vitkit.nn.activation_checkpointing import find_recomputable_blocks
from vitkit.nn.attention import AttentionRecorder


@dataclass
class Parameters:
    """Numbers of parameters."""

    total: int = 0
    trainable: int = 0


def count_parameters(model: nn.Module) -> dict[str, Parameters]:
    """Return the counts of every module; a parameter that a module holds under several names counts once."""
    counts = {}
    for name, module in model.named_modules():
        trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
        counts[name] = Parameters(sum(p.numel() for p in module.parameters()), trainable)
    return counts


def parts(model: nn.Module, depth: int) -> list[str]:
    """Return the dotted names of modules down to a depth, parents before children, "" first."""
    return [name for name, _ in model.named_modules() if name.count(".") < depth or not name]


@dataclass
class AttentionMatrices:
    """The attention matrices of one module in one forward pass."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """(B, heads, L, S) of each call."""
    fused: bool = False
    """Whether a fused kernel computed them, which stores one number per row instead of the matrices."""

    def elements(self) -> int:
        """Return the number of elements of all matrices."""
        return sum(map(math.prod, self.shapes))

    def rows(self) -> int:
        """Return the number of rows of all matrices."""
        return sum(math.prod(shape[:-1]) for shape in self.shapes)


def attention_matrices(model: nn.Module, *inputs: Tensor, **named: Any) -> dict[str, AttentionMatrices]:
    """Return module name -> its attention matrices. With model and inputs on "meta" this takes no memory or time."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with track_running_modules(model) as running, _FusedCalls(running) as calls:
                model(*inputs, **named)
            fused = calls.by_module
            with AttentionRecorder(model) as maps:
                model(*inputs, **named)
                shapes = {name: [tuple(weights.shape) for weights in recorded] for name, recorded in maps.items()}
    finally:
        model.train(was_training)
    # Attention in other libraries' modules is seen only if it calls the fused kernel.
    return {
        name: AttentionMatrices(shapes.get(name, fused.get(name)), name in fused)
        for name, _ in model.named_modules()
        if name in shapes or name in fused
    }


class _FusedCalls(TorchFunctionMode):
    """Record the calls of the fused attention kernel: module name -> shapes of the matrices that it does not store."""

    def __init__(self, running: list[str]):
        super().__init__()
        self.running = running
        self.by_module: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and self.running:
            query, key = args[:2]
            self.by_module[self.running[-1]].append((*query.shape[:-1], key.shape[-2]))
        return func(*args, **(kwargs or {}))


@dataclass
class Cost:
    """Time and memory of one part, in a forward pass."""

    seconds: float = 0.0
    """The median time."""
    peak_bytes: int = 0
    """The peak memory of tensors, minus that at the start of the part."""
    saved_bytes: int = 0
    """The memory that the part saves for the backward pass in a training step."""


def measure(model: nn.Module, *inputs: Tensor, names: list[str], repeats: int = 5) -> dict[str, Cost]:
    """Measure time and memory of parts.

    Memory is that of tensors between operators; the workspace within an operator is not included.

    Args:
        names: the parts; those that are not called are left out.
        repeats: number of timed runs.
    """
    device = inputs[0].device
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            _measure_memory(model, inputs, names)  # a warm-up as well
            peaks = _measure_memory(model, inputs, names)
            times = _measure_time(model, inputs, names, device, repeats)
        model.train(was_training)
        saved = count_saved_by_part(model, inputs, names)
    finally:
        model.train(was_training)
    return {name: Cost(statistics.median(times[name]), peaks[name], saved[name]) for name in names if name in times}


@contextmanager
def _around(
    model: nn.Module, names: list[str], enter: Callable[[], Any], leave: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call `enter()` before each call of the modules, and `leave(name, result of enter)` after it."""
    handles, states = [], []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(lambda *_: states.append(enter())))
        handles.append(module.register_forward_hook(lambda *_, name=name: leave(name, states.pop())))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _measure_time(
    model: nn.Module, inputs: tuple, names: list[str], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        spent: Counter[str] = Counter()

        def leave(name: str, start: float, spent: Counter = spent) -> None:
            spent[name] += now() - start

        with _around(model, names, now, leave):
            model(*inputs)
        for name, seconds in spent.items():
            times[name].append(seconds)
    return times


def _measure_memory(model: nn.Module, inputs: tuple, names: list[str]) -> Counter[str]:
    peaks: Counter[str] = Counter()
    memory = _LiveTensors()

    def leave(name: str, begin: int) -> None:
        since = memory.history[begin:]
        peaks[name] = max(peaks[name], max(since) - since[0])

    with memory, _around(model, names, lambda: len(memory.history) - 1, leave):
        model(*inputs)
    return peaks


def count_saved_by_part(model: nn.Module, inputs: tuple, names: list[str]) -> Counter[str]:
    """Return the bytes that each part's forward pass saves for the backward pass.

    Args:
        names: names of the parts, as `parts` returns them.
    """
    by_part: Counter[str] = Counter()
    saved = _SavedTensors([*model.parameters(), *model.buffers(), *inputs])

    def leave(name: str, start: int) -> None:
        by_part[name] += saved.bytes - start

    with torch.enable_grad(), saved.watch(), _around(model, names, lambda: saved.bytes, leave):
        model(*inputs)
    return by_part


def saved_bytes(step: Callable[[], Any], modules: Sequence[nn.Module]) -> int:
    """Return the number of bytes that a training step saves for its backward pass.

    Args:
        step: computes the loss.
        modules: modules whose parameters and buffers are not counted.
    """
    saved = _SavedTensors([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])
    with torch.enable_grad(), saved.watch():
        step()
    return saved.bytes


OPTIMIZER_STATES = {"AdamW": 2, "Adam": 2, "Muon": 2, "SGD": 1}
"""Optimizer -> the number of values that it stores for each parameter, at most."""


@dataclass
class TrainingMemory:
    """Bytes that each process of a run holds, in addition to those that autograd saves."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    """Bytes of the unsharded weights and gradients of blocks while they compute."""

    @property
    def total(self) -> int:
        """The sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def training_memory(model: nn.Module, *, states: int, gpus: int = 1, sharded: bool = False) -> TrainingMemory:
    """Calculate the memory of weights, gradients and optimizer; the model may be on "meta".

    Args:
        states: values that the optimizer stores for each parameter, see OPTIMIZER_STATES.
        gpus: number of processes.
        sharded: whether the model is sharded among the processes, block by block (FSDP2); otherwise each process has
            the full model (DDP). Blocks are modules that support activation checkpointing.
    """
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    if not sharded:
        trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
        return TrainingMemory(sum(sizes.values()), trained, states * trained)
    # Each weight is sharded along its first dimension, and the first process has the largest shard.
    shards = {p: size * -(-len(p) // gpus) // len(p) if p.ndim and len(p) else size for p, size in sizes.items()}
    trained = sum(size for parameter, size in shards.items() if parameter.requires_grad)
    blocks = [list(block.parameters()) for block in find_recomputable_blocks(model).values()]
    inside = {parameter for block in blocks for parameter in block}
    rest = sum(size for parameter, size in sizes.items() if parameter not in inside)
    largest = max((sum(sizes[parameter] for parameter in block) for block in blocks), default=0)
    # Parameters outside of blocks stay unsharded from the forward to the end of the backward pass, with their
    # gradients. In addition, there are the block that computes, with its gradients, and the prefetched next block.
    return TrainingMemory(sum(shards.values()), trained, states * trained, 2 * rest + 3 * largest)


class _SavedTensors:
    """Count the storages that autograd saves, each once.

    Args:
        excluded: tensors that are not counted: parameters, buffers, inputs.
    """

    def __init__(self, excluded: Sequence[Tensor]):
        self.bytes = 0
        # Storages are told apart by object, as those of tensors on "meta" all have the same memory address.
        self._seen = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._alive: list[Tensor] = []  # so that no storage is freed and its identifier reused

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


class _LiveTensors(TorchDispatchMode):
    """Count the bytes of the tensors that operators returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.history = [0]
        """The number of bytes after each change."""
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(outputs) if isinstance(x, Tensor)):
            if storage._cdata not in inputs and storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.history.append(self.history[-1] + storage.nbytes())
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return outputs

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self.history.append(self.history[-1] - size)
