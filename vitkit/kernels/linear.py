"""Linear layers and dropout, faster on a CPU than by torch's functions.

Times and memory were measured on one thread of an AMD EPYC with AVX-512, torch 2.14.1.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitkit.devices import processor_field
from vitkit.kernels import is_traced, plain_only


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cache: MutableMapping[str, Any] | None = None
) -> Tensor:
    """F.linear with the processor's fastest matrix product.

    Args:
        x: (..., C).
        weight: (D, C).
        bias: (D,).
        cache: belongs to a weight that seldom changes, which is kept there in the order in which oneDNN otherwise
            brings it at every call: that takes up to a quarter of a product of 580 rows. Empty at first.
    Returns:
        (..., D).
    """
    if plain_only() or is_traced() or not _is_large_on_cpu(x, weight) or not onednn_is_fast():
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        # Applied to rows, since the output of a Function must not be a view if it is later modified in place.
        return _Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
    if cache is None:
        return onednn_product(x, weight, bias)
    # An optimizer, or whoever loads weights, changes them in place, which their version counts.
    version = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    if cache.get("of") is not weight or cache["version"] != version:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), x.shape[:-1].numel())
        cache.update(of=weight, version=version, weight=reordered)
    return onednn_product(x, cache["weight"], bias)


def _is_large_on_cpu(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        # From this number of multiplications on, the faster product outweighs its larger overhead.
        and x.numel() * len(weight) >= 2**20
        and x.numel() >= 8 * x.shape[-1]
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")  # which converts the arguments of F.linear
    )


@functools.cache
def onednn_is_fast() -> bool:
    """Return whether this is an AMD processor with AVX-512, and PyTorch has oneDNN's product.

    MKL, PyTorch's default for float32, uses only half of the vector width of these processors; oneDNN, which PyTorch
    includes for convolutions, uses all of it. With it, inference of ViT-B (224x224, batch 4) takes 0.84 of the time; on
    another EPYC it took 0.54 of timm's time. On AMD processors with only AVX2, MKL is faster: inference with oneDNN
    takes 1.05 of its time for a ViT-B, 1.07 for a Swin-T.
    """
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and processor_field("vendor_id") == "AuthenticAMD"
    )


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight.mT + bias in float32, by a private PyTorch operator that has no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def is_in_autocast(x: Tensor) -> bool:
    """Return whether operators on a tensor convert it to half precision, where they gain from that."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)  # meta tensors have no autocast


def without_autocast(backward: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    """Let a backward pass compute in the dtypes of the forward pass, also if it is called inside autocast."""

    @functools.wraps(backward)
    def compute(ctx: Any, grad: Tensor) -> Any:
        if not is_in_autocast(grad):
            return backward(ctx, grad)
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad)

    return compute


class _Linear(torch.autograd.Function):
    """`onednn_product` for rows (N, C), with gradients by the same product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # For transposed rows with gaps between them, such as those of a chunk, oneDNN takes a hundred times as long.
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = onednn_product(grad, weight.mT) if ctx.needs_input_grad[0] else None
        grad_weight = _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(dim=0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad.mT @ x, the gradient of a weight (D, C), for rows (N, D) and (N, C)."""
    # oneDNN copies its first argument if it is transposed, so that is the narrower one.
    if x.shape[1] < grad.shape[1]:
        return linear(x.mT, grad.mT).mT.contiguous()
    return linear(grad.mT, x.mT)


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear(F.gelu(x), weight, bias)`; see `linear`.

    The backward pass computes the activations of the wide hidden layer once more instead of storing them. A training
    step of MAE with a ViT-B (224x224, batch 8) takes 0.79 of the peak memory (543 rather than 688 MiB) and 1.03 of the
    time.
    """
    if plain_only() or is_traced() or not torch.is_grad_enabled():
        return linear(F.gelu(x), weight, bias)
    x, weight, bias = _as_in_autocast(x, weight, bias)
    return _GeluLinear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def _as_in_autocast(x: Tensor, *others: Tensor | None) -> Iterator[Tensor | None]:
    """Convert tensors to the dtype that autocast computes products in, if it is on; it leaves float64 as it is."""
    if not is_in_autocast(x) or x.dtype == torch.float64:
        return iter((x, *others))
    dtype = torch.get_autocast_dtype(x.device.type)
    return (tensor if tensor is None else tensor.to(dtype) for tensor in (x, *others))


class _GeluLinear(torch.autograd.Function):
    """`gelu_linear` for rows (N, C)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(F.gelu(x), weight, bias)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_weight = _weight_gradient(grad, F.gelu(x)) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.gelu_backward(linear(grad, weight.mT), x)
        return grad_x, grad_weight, grad.sum(dim=0) if ctx.needs_input_grad[2] else None


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """Compute F.dropout(F.relu(x), p)."""
    if plain_only() or is_traced():
        return F.dropout(F.relu(x), p)
    return ReluDropout.apply(x, p)


class ReluDropout(torch.autograd.Function):
    """ReLU, then dropout: the widest activations of a transformer are stored once instead of three times.

    A training step of Deformable DETR-R50 (480x640, batch 1) takes 0.79 of the peak memory (1179 rather than 1490 MiB)
    and 0.95 of the time; one of DETR-R50 (batch 2) takes 0.98 of the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Return the output, which is all that the backward pass needs."""
        output = _dropout_(x.relu(), p)
        # The output is positive exactly where a gradient passes through both, so the backward pass needs nothing else.
        ctx.save_for_backward(output)
        ctx.gain = 1 / (1 - p) if p < 1 else 0.0
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        (output,) = ctx.saved_tensors
        return (grad * ctx.gain).masked_fill_(output == 0, 0), None


def _dropout_(x: Tensor, p: float) -> Tensor:
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return x.masked_fill_(draw_dropped(x.shape, p), 0).mul_(1 / (1 - p) if p < 1 else 0.0)


def draw_dropped(shape: torch.Size, p: float) -> Tensor:
    """Draw which elements dropout drops: bool, on the CPU; p is rounded to a multiple of 1 / 65536."""
    # Four elements share one draw of 64 bits: drawing floats would take several times as long.
    draws = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return draws[: shape.numel()].view(shape) < round(p * 2**16) - 2**15
