"""Count the activations that a training step saves, on fake tensors, which have shapes but take no memory."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from vitkit.apps.analysis.memory import count_saved_by_part, saved_bytes
from vitkit.devices import Precision
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing, find_recomputable_blocks

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Activations:
    """Bytes of activations that one process holds at the start of the backward pass."""

    saved: int
    """Bytes saved by the forward pass, without losses."""
    recomputed: int = 0
    """Bytes of the block with the most activations, while activation checkpointing recomputes it."""


def choose_countable_device() -> Literal["cpu", "cuda"]:
    """Return "cuda" if torch can count a GPU's kernels: without a GPU, 2.6 aborts the process, 2.15 does not."""
    needs_none = torch.version.cuda is not None and torch.__version__ >= (2, 15)
    return "cuda" if needs_none or torch.cuda.is_available() else "cpu"


def count_activations(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    device: Literal["cpu", "cuda"] | None = None,
    precision: Precision = "fp32",
    checkpointing: bool = False,
) -> Activations:
    """Count activations without computing them, which needs neither the device nor its memory.

    Args:
        model: may be on "meta".
        shape: shape of the images or clips, (B, 3, ..., H, W).
        device: the device whose kernels are assumed; on a GPU, attention is a fused kernel. None: that of
            `choose_countable_device()`.
        precision: the precision of autocast.
        checkpointing: whether blocks recompute their activations in the backward pass.
    Raises:
        ConfigError: with checkpointing, the model has no block that supports it.
    """
    device = device or choose_countable_device()
    model = copy.deepcopy(model).to("meta").train()
    blocks = list(find_recomputable_blocks(model))
    attention = FusedAttention() if device == "cuda" else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), _autocast(device, precision), attention:
        model.to_empty(device=device)
        images = torch.zeros(shape, device=device)
        if not checkpointing:
            return Activations(saved_bytes(lambda: model(images), [model]))
        by_block = count_saved_by_part(model, (images,), blocks)
        enable_activation_checkpointing(model)
        return Activations(saved_bytes(lambda: model(images), [model]), max(by_block.values(), default=0))


@contextmanager
def _autocast(device: str, precision: str) -> Iterator[None]:
    """Switch autocast on like torch.autocast, which refuses to do so for "cuda" without a GPU."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, precision != "fp32")
    torch.set_autocast_dtype(device, _DTYPES.get(precision, dtype))
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


class FusedAttention(TorchFunctionMode):
    """Count attention as a fused kernel; for fake tensors PyTorch has none, and would save the attention matrices."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v, *rest = args
        bias = rest[0] if rest else kwargs.get("attn_mask")
        if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
            q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
        return _SaveAsFused.apply(q, k, v, bias)


class _SaveAsFused(torch.autograd.Function):
    """Save what a fused attention kernel saves, and compute nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        # The output's memory layout is (B, L, heads, d), as that of the kernels. They also save each row's logsumexp.
        out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), bias)
        return out
