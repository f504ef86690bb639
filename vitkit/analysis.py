"""What a model costs, by part: parameters, memory, time.

A part is a module under its dotted name, with all that is below it; "" is the whole model.
"""

import math
import statistics
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitkit.nn.attention import AttentionRecorder


@dataclass
class Parameters:
    total: int = 0
    trainable: int = 0


def count_parameters(model: nn.Module) -> dict[str, Parameters]:
    """Of every module; a parameter that it holds under several names counts once."""
    counts = {}
    for name, module in model.named_modules():
        own = list(module.parameters())
        trainable = sum(p.numel() for p in own if p.requires_grad)
        counts[name] = Parameters(sum(p.numel() for p in own), trainable)
    return counts


def parts(model: nn.Module, depth: int) -> list[str]:
    """The dotted names of modules down to a depth, parents before children, "" first."""
    return [name for name, _ in model.named_modules() if name.count(".") < depth or not name]


@dataclass
class Attention:
    """The attention matrices of one module in one forward pass."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """(B, heads, L, S) of each call."""
    fused: bool = False
    """By a kernel that never holds them whole: it keeps a number per row."""

    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def rows(self) -> int:
        return sum(math.prod(shape[:-1]) for shape in self.shapes)


def attention_matrices(model: nn.Module, *inputs: Tensor) -> dict[str, Attention]:
    """Module name -> its attention matrices. Costs neither memory nor time where model and inputs are on "meta"."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with _FusedCalls(model) as fused:
                model(*inputs)
            with AttentionRecorder(model) as maps:
                model(*inputs)
                shapes = {name: [tuple(weights.shape) for weights in maps.pop(name)] for name in list(maps)}
    finally:
        model.train(was_training)
    # Attention of other libraries is seen only where it calls the fused kernel.
    found = {name: Attention(shapes.get(name, fused.get(name)), name in fused) for name in {**shapes, **fused}}
    order = [name for name, _ in model.named_modules()]
    return {name: found[name] for name in sorted(found, key=order.index)}


class _FusedCalls(TorchFunctionMode):
    """Notes the calls of the fused attention kernel: module name -> shapes of the matrices it does not hold."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.calls: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.running: list[str] = []

    def __enter__(self) -> Mapping[str, list[tuple[int, ...]]]:
        self.handles = []
        for name, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.running.append(name)))
            self.handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))
        super().__enter__()
        return self.calls

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()

    def _leave(self) -> None:
        self.running.pop()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and self.running:
            query, key = args[:2]
            self.calls[self.running[-1]].append((*query.shape[:-1], key.shape[-2]))
        return func(*args, **(kwargs or {}))


@dataclass
class Cost:
    """Of one part, in a forward pass."""

    seconds: float = 0.0
    """Median."""
    peak_bytes: int = 0
    """Most memory of tensors, above what there was at the part's start."""
    kept_bytes: int = 0
    """What a training step keeps of it for the backward pass."""


def measure(model: nn.Module, *inputs: Tensor, names: list[str], repeats: int = 5) -> dict[str, Cost]:
    """Time and memory of parts.

    Memory on a CPU is that of tensors between operators; an operator's own workspace is not seen there.

    Args:
        names: the parts; those that are not called are left out.
        repeats: of the timing.
    """
    device = inputs[0].device
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad():
            _measure_memory(model, inputs, names, device)  # a warm-up as well
            peaks = _measure_memory(model, inputs, names, device)
            times = _measure_time(model, inputs, names, device, repeats)
        model.train(was_training)
        kept = _measure_kept(model, inputs, names)
    finally:
        model.train(was_training)
    return {
        name: Cost(statistics.median(times[name]), peaks[name], kept.get(name, 0)) for name in names if name in times
    }


@contextmanager
def _around(
    model: nn.Module, names: list[str], enter: Callable[[], Any], leave: Callable[[str, Any], None]
) -> Iterator[None]:
    """Calls `enter()` before and `leave(name, what enter returned)` after each call of the modules."""
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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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


def _measure_memory(model: nn.Module, inputs: tuple, names: list[str], device: torch.device) -> Counter[str]:
    peaks: Counter[str] = Counter()
    tensors = _CudaMemory(device) if device.type == "cuda" else _LiveTensors()

    def leave(name: str, before: tuple[int, int]) -> None:
        start, outer_peak = before
        peaks[name] = max(peaks[name], tensors.peak() - start)
        tensors.raise_peak(outer_peak)

    with tensors, _around(model, names, tensors.restart_peak, leave):
        model(*inputs)
    return peaks


def _measure_kept(model: nn.Module, inputs: tuple, names: list[str]) -> Counter[str]:
    """What each part's forward pass saves for the backward pass."""
    kept: Counter[str] = Counter()
    saved = _Saved([*model.parameters(), *model.buffers(), *inputs])

    def leave(name: str, start: int) -> None:
        kept[name] += saved.bytes - start

    with torch.enable_grad(), saved.watch(), _around(model, names, lambda: saved.bytes, leave):
        model(*inputs)
    return kept


def kept_bytes(step: Callable[[], Any], modules: Sequence[nn.Module]) -> int:
    """What a training step keeps for its backward pass.

    Args:
        step: computes the loss.
        modules: whose parameters and buffers do not count.
    """
    saved = _Saved([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())])
    with torch.enable_grad(), saved.watch():
        step()
    return saved.bytes


OPTIMIZER_STATES = {"AdamW": 2, "Adam": 2, "SGD": 1}
"""Numbers that an optimiser keeps for each weight."""


@dataclass
class TrainingMemory:
    """Bytes that each process of a run holds, besides what autograd keeps."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0
    """Weights and gradients of blocks that are whole while they compute."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered


def training_memory(model: nn.Module, *, states: int, gpus: int = 1, divided: bool = False) -> TrainingMemory:
    """What weights, gradients and optimiser take; by calculation, so that the model may be on "meta".

    Args:
        states: of the optimiser, see OPTIMIZER_STATES.
        gpus: processes.
        divided: among them, block by block (FSDP2); else each has all of it (DDP). Blocks are modules with an attribute
            `recompute`.
    """
    sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in model.parameters()}
    if not divided:
        trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
        return TrainingMemory(sum(sizes.values()), trained, states * trained)
    # Each weight is cut along its first dimension, and the first process has the largest part.
    own = {p: size * -(-len(p) // gpus) // len(p) if p.ndim and len(p) else size for p, size in sizes.items()}
    trained = sum(size for parameter, size in own.items() if parameter.requires_grad)
    blocks = [list(module.parameters()) for module in model.modules() if hasattr(module, "recompute")]
    inside = {parameter for block in blocks for parameter in block}
    rest = sum(size for parameter, size in sizes.items() if parameter not in inside)
    largest = max((sum(sizes[parameter] for parameter in block) for block in blocks), default=0)
    # What is in no block stays whole from the forward to the end of the backward pass, with its gradients; of blocks
    # the one that computes, with its gradients, and the next one, whose weights arrive meanwhile.
    return TrainingMemory(sum(own.values()), trained, states * trained, 2 * rest + 3 * largest)


class _Saved:
    """Counts the storages that autograd saves, each once."""

    def __init__(self, own: Sequence[Tensor]):
        """
        Args:
            own: tensors that do not count: parameters, buffers, inputs.
        """
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._alive: list[Tensor] = []  # so that no storage is freed and its address used again

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._alive.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


class _LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that operators returned and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in inputs:
                self._watch(x.untyped_storage())
        return outputs

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def restart_peak(self) -> tuple[int, int]:
        """Bytes now, and the peak so far."""
        before = self.now, self.most
        self.most = self.now
        return before

    def peak(self) -> int:
        return self.most

    def raise_peak(self, peak: int) -> None:
        self.most = max(self.most, peak)


class _CudaMemory:
    """The same, as the CUDA allocator counts."""

    def __init__(self, device: torch.device):
        self.device = device
        self.most = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass

    def restart_peak(self) -> tuple[int, int]:
        before = torch.cuda.memory_allocated(self.device), self.peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.most = 0
        return before

    def peak(self) -> int:
        return max(self.most, torch.cuda.max_memory_allocated(self.device))

    def raise_peak(self, peak: int) -> None:
        self.most = max(self.most, peak)
