"""Small layers, and the switch that trades activation memory for a second forward pass."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError
from vitkit.nn.linear import Linear


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    Args:
        channels: sizes from input to output; (256, 256, 4) makes two layers.
    """

    def __init__(self, channels: tuple[int, ...]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(channels))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu_(layer(x))
        return self.layers[-1](x)


class FeedForward(nn.Module):
    """The two-layer network of a transformer layer, with dropout between."""

    def __init__(self, d_model: int, d_ffn: int, *, dropout: float = 0.0):
        super().__init__()
        self.linear1 = Linear(d_model, d_ffn)
        self.linear2 = Linear(d_ffn, d_model)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        if self.training and self.dropout:
            x = _ReluDropout.apply(x, self.dropout)
        else:
            # In place, the gradient of `linear`'s view would be copied; what ReLU reads is not kept in either case.
            x = F.relu(x) if x.requires_grad else F.relu_(x)
        return self.linear2(x)


class TokenMLP(Mlp):
    """The two-layer network of a block of a vision transformer, with GELU between."""

    part = 512
    """Tokens at a time and thread, more or less, on a CPU when no gradient is wanted: their hidden channels stay in the
    cache."""

    def __init__(self, d_model: int, d_hidden: int, d_out: int | None = None):
        super().__init__(d_model, d_hidden, d_out)
        self.fc1, self.fc2 = Linear(d_model, d_hidden), Linear(d_hidden, d_out or d_model)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x)
        # Equal parts, as a few left over would take the matrix products longer than their number says.
        num_parts = round(x.shape[:-1].numel() / (self.part * torch.get_num_threads()))
        if num_parts < 2:
            return super().forward(x)
        parts = [super(TokenMLP, self).forward(part) for part in x.flatten(0, -2).tensor_split(num_parts)]
        return torch.cat(parts).unflatten(0, x.shape[:-1])


class _ReluDropout(torch.autograd.Function):
    """ReLU, then dropout. Its output tells both where a gradient passes, so nothing else is kept for the backward pass:
    the widest activations of a transformer are kept once in place of three times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        output = _dropout_(x.relu(), p)
        ctx.save_for_backward(output)
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (output,) = ctx.saved_tensors
        return (grad * ctx.scale).masked_fill_(output == 0, 0), None


def _dropout_(x: Tensor, p: float) -> Tensor:
    """Dropout, in place on a CPU."""
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return x.masked_fill_(draw_dropped(x.shape, p), 0).mul_(1 / (1 - p) if p < 1 else 0.0)


def draw_dropped(shape: torch.Size, p: float) -> Tensor:
    """What dropout drops, bool on the CPU, where a float drawn for each element takes an eighth of a training step."""
    # Four elements share one draw of 64 bits; p is kept to 1 in 65536.
    draws = torch.empty(-(-shape.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return draws[: shape.numel()].view(shape) < round(p * 2**16) - 2**15


def enable_activation_checkpointing(model: nn.Module, enabled: bool = True) -> int:
    """Lets the blocks of a model forget their activations and recompute them in the backward pass.

    A block takes part by the class attribute `recompute = False`; its owner calls it through `run_block`.
    Gradients and statistics stay the same; a training step takes about a third longer.

    Returns:
        the number of blocks that take part.
    Raises:
        ConfigError: the model has no such block.
    """
    blocks = [module for module in model.modules() if hasattr(module, "recompute")]
    if not blocks:
        raise ConfigError(f"{type(model).__name__} has no blocks that can recompute their activations.")
    for block in blocks:
        block.recompute = enabled
    return len(blocks)


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`block(...)`, its activations recomputed in the backward pass where `enable_activation_checkpointing` says so."""
    if not (block.recompute and block.training):
        return block(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    contexts = partial(_recompute_contexts, block)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _recompute_contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    return nullcontext(), _keep_statistics(block)


@contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Batch norms see a batch a second time when it is recomputed; it counts once."""
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)
