"""MACs (multiply-accumulate operations) of a model, by module and by operator.

They are counted as in papers on vision models and by fvcore: a multiplication with its addition counts one, in matrix
products, convolutions, attention and sampling, by the formulas of `torch.utils.flop_counter`; norms count as in
fvcore's estimate (2 to 5 per value). Element-wise operations, activations, softmax and reductions are not counted.
Operators of any other kind are reported.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitkit.kernels import use_kernels


def _per_output(count: int) -> Callable[..., int]:
    return lambda *args, out_val, **kwargs: count * out_val.numel()


def _per_input(x: Tensor, *args: Any, **kwargs: Any) -> int:
    return x.numel()


def _batch_norm(x: Tensor, weight: Tensor | None, *args: Any, **kwargs: Any) -> int:
    return x.numel() * (1 if weight is None else 2)


def _layer_norm(x: Tensor, shape: Any, weight: Tensor | None, *args: Any, **kwargs: Any) -> int:
    return x.numel() * (4 if weight is None else 5)


def _group_norm(x: Tensor, weight: Tensor | None, *args: Any, **kwargs: Any) -> int:
    return x.numel() * (4 if weight is None else 5)


def _unfold(x: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    # Local relation multiplies each value of its windows once; the mask of the map's interior, with one channel, is
    # unfolded without products.
    return out_val.numel() if x.shape[1] > 1 else 0


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> int:
    return q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten.native_batch_norm": _batch_norm,
    "aten._native_batch_norm_legit_no_training": _batch_norm,
    "aten.native_layer_norm": _layer_norm,
    "aten.native_group_norm": _group_norm,
    "aten._adaptive_avg_pool2d": _per_input,
    "aten._adaptive_avg_pool3d": _per_input,
    "aten.avg_pool2d": _per_input,
    "aten.avg_pool3d": _per_input,
    "aten.upsample_nearest2d": _per_output(1),
    "aten.upsample_linear1d": _per_output(2),
    "aten.upsample_bilinear2d": _per_output(4),
    "aten.upsample_bicubic2d": _per_output(16),
    "aten._upsample_bicubic2d_aa": _per_output(16),
    "aten.grid_sampler_2d": _per_output(4),
    "aten.im2col": _unfold,
}
"""Operator that torch.utils.flop_counter does not count -> its MACs, from its arguments and its output `out_val`."""

_MOVES = (
    "_local_scalar_dense _pack_padded_sequence _to_copy _unsafe_view all any arange argmax argsort as_strided_ "
    "bitwise_and bitwise_not bitwise_or bucketize cat clone constant_pad_nd copy_ embedding empty empty_like eq eye "
    "fill_ flip full full_like gather ge gt index index_copy index_fill index_fill_ index_put index_put_ index_select "
    "isfinite isnan le lift_fresh linspace logical_and logical_not logical_or lt masked_fill masked_fill_ "
    "masked_scatter ne new_empty new_full new_ones new_zeros nonzero ones ones_like promote_types rand randint randn "
    "repeat repeat_interleave roll scalar_tensor scatter scatter_ sort stack topk transpose_ tril triu unsafe_split "
    "where zero_ zeros zeros_like"
)
"""Operators that create, move, select or compare values; views are recognized without this list."""
_ARITHMETIC = (
    "_log_softmax _safe_softmax _softmax amax amin avg_pool1d cumsum linalg_vector_norm logsumexp max "
    "max_pool2d_with_indices max_pool3d_with_indices mean min prod std sum var var_mean"
)
"""Softmax, pooling and reductions, which papers do not count; element-wise operators are recognized by their tag."""


@dataclass
class Macs:
    """MACs of one forward pass."""

    by_module: Counter[str]
    by_operator: Counter[str]
    uncounted: Counter[str]
    """Number of calls of each operator that papers do not count."""
    unknown: Counter[str]
    """Number of calls of each operator that is not counted but perhaps should be."""

    @property
    def total(self) -> int:
        """MACs of the whole model."""
        return self.by_module[""]


def count_macs(model: nn.Module, *inputs: Tensor, **named: Any) -> Macs:
    """Run the model once, in evaluation mode and with the plain definitions of its operators, and count its MACs.

    Args:
        inputs: positional arguments of `forward`, on the model's device.
        named: keyword arguments of `forward`.
    """
    return count_call(model, lambda: model(*inputs, **named))


def count_call(model: nn.Module, call: Callable[[], Any], *, methods: Sequence[str] = ()) -> Macs:
    """Count the MACs of a call that runs the model or parts of it, as `count_macs` does.

    Args:
        methods: names of methods besides `forward` whose operators are counted for their module.
    """
    was_training = model.training
    model.eval()
    try:
        with (
            torch.no_grad(),
            use_kernels("plain"),
            track_running_modules(model, methods) as running,
            _MacCounter(running) as counter,
        ):
            call()
    finally:
        model.train(was_training)
    by_module = Counter({name: 0 for name, _ in model.named_modules()})
    for name, macs in counter.by_module.items():
        parts = name.split(".") if name else []
        for depth in range(len(parts) + 1):
            by_module[".".join(parts[:depth])] += macs
    return Macs(by_module, counter.by_operator, counter.uncounted, counter.unknown)


def count_step(step: Callable[[], Tensor]) -> int:
    """Count the MACs of a forward pass and of the backward pass from the sum of its output.

    In the backward pass, norms and other operators that are not products count nothing.
    """
    with torch.enable_grad(), use_kernels("plain"), _MacCounter([]) as counter:
        step().float().sum().backward()
    return sum(counter.by_operator.values())


@contextmanager
def track_running_modules(model: nn.Module, methods: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield a list that holds the names of the modules whose `forward` or `methods` are running, innermost last."""
    running: list[str] = []
    handles = []

    def record_calls(method: Callable, name: str) -> Callable:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                return method(*args, **kwargs)
            finally:
                running.pop()

        return call

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
            handles.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
            for method in methods:
                if hasattr(module, method):
                    stack.enter_context(patch.object(module, method, record_calls(getattr(module, method), name)))
        try:
            yield running
        finally:
            for handle in handles:
                handle.remove()


class _MacCounter(TorchDispatchMode):
    """Count each operator for the module that calls it.

    torch's FlopCounterMode, whose formulas are used, does not report operators without a formula, and names modules
    only below those that it saw being called.
    """

    def __init__(self, running: list[str]):
        super().__init__()
        self.running = running
        self.by_module: Counter[str] = Counter()
        self.by_operator: Counter[str] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        operator = func.overloadpacket
        kind, _, name = str(operator).partition(".")
        if f"{kind}.{name}" in FORMULAS:
            macs = FORMULAS[f"{kind}.{name}"](*args, out_val=outputs, **kwargs)
        elif operator in flop_registry:
            macs = flop_registry[operator](*args, out_val=outputs, **kwargs) // 2
        else:
            if not func.is_view and name not in _MOVES.split():
                is_uncounted = torch.Tag.pointwise in func.tags or name in _ARITHMETIC.split()
                (self.uncounted if is_uncounted else self.unknown)[name] += 1
            return outputs
        self.by_operator[name] += macs
        self.by_module[self.running[-1] if self.running else ""] += macs
        return outputs
