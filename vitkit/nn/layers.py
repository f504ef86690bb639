"""Small layers, and the switch that trades activation memory for a second forward pass."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError


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
        self.linear1 = nn.Linear(d_model, d_ffn)
        self.linear2 = nn.Linear(d_ffn, d_model)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear1(x)
        x = _ReluDropout.apply(x, self.dropout) if self.training and self.dropout else F.relu_(x)
        return self.linear2(x)


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
    """Dropout, in place on a CPU, where drawing a float per element takes an eighth of a whole training step."""
    if x.device.type != "cpu":
        return F.dropout(x, p)
    # Four elements share one draw of 64 bits; p is kept to 1 in 65536.
    draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    dropped = draws[: x.numel()].view(x.shape) < round(p * 2**16) - 2**15
    return x.masked_fill_(dropped, 0).mul_(1 / (1 - p) if p < 1 else 0.0)


def enable_activation_checkpointing(model: nn.Module, enabled: bool = True) -> int:
    """Lets the blocks of a model forget their activations and recompute them in the backward pass.

    A block takes part by the class attribute `recompute = False`; its owner calls it through `run_block`.
    Gradients stay the same; a training step takes about a third longer.

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
    if block.recompute and block.training:
        return checkpoint(block, *args, use_reentrant=False, **kwargs)
    return block(*args, **kwargs)
