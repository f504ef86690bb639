"""Count and time what layers that mix the tokens of a sequence cost by its length (Vaswani et al. 2017, table 1,
https://arxiv.org/abs/1706.03762)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.analysis.macs import count_macs
from vitkit.devices import synchronize
from vitkit.nn.attention import MultiHeadAttention
from vitkit.nn.sequence_convolution import SequenceConvolution

RESTRICTED, KERNEL = 16, 3
"""The block size of restricted self-attention, and the kernel size of a convolution, in tokens."""


class _SelfAttention(nn.Module):
    """Self-attention in which each token attends to all tokens, or only to those of its block of `size` tokens."""

    def __init__(self, d_model: int, num_heads: int, size: int | None = None):
        super().__init__()
        self.attention = MultiHeadAttention(d_model, num_heads)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if self.size is None:
            return self.attention(x, x, x)
        batch, length, _ = x.shape
        blocks = F.pad(x, (0, 0, 0, -length % self.size)).unflatten(1, (-1, self.size)).flatten(0, 1)
        return self.attention(blocks, blocks, blocks).unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


class LayerKind(NamedTuple):
    """A kind of layer, a row of the paper's table."""

    build: Callable[[int, int], nn.Module]
    """Builds the layer from d_model and the number of heads."""
    complexity: str
    """The complexity in the paper's table."""
    formula: str
    """The MACs with their constants, as a formula of length n and channels d."""
    macs: Callable[[int, int], int]
    """Computes the MACs by this formula, from length and channels."""
    sequential: str
    """The number of sequential operations in the paper's table."""
    path: str
    """The maximum path length between two tokens, in layers; for a convolution the paper's length without dilation
    (section 4), as its table has dilated ones (log_k n)."""


LAYER_KINDS = {
    "self-attention": LayerKind(
        lambda d, heads: _SelfAttention(d, heads),
        "n^2 d", "2 n^2 d + 4 n d^2", lambda n, d: 2 * n * n * d + 4 * n * d * d, "1", "1",
    ),
    f"restricted to {RESTRICTED}": LayerKind(
        lambda d, heads: _SelfAttention(d, heads, RESTRICTED),
        "r n d", "2 r n d + 4 n d^2", lambda n, d: 2 * RESTRICTED * n * d + 4 * n * d * d, "1", "n/r",
    ),
    "recurrent": LayerKind(
        lambda d, heads: nn.RNN(d, d, batch_first=True),
        "n d^2", "2 n d^2", lambda n, d: 2 * n * d * d, "n", "n",
    ),
    f"convolutional, kernel {KERNEL}": LayerKind(
        lambda d, heads: SequenceConvolution(d, KERNEL),
        "k n d^2", "k n d^2", lambda n, d: KERNEL * n * d * d, "1", "n/k",
    ),
}  # fmt: skip
"""Name -> kind of layer. The paper's complexities leave out projections: those of attention (4 n d^2), and that of a
recurrent layer's input (n d^2)."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer at one sequence length."""

    kind: str
    """The layer's name in LAYER_KINDS."""
    length: int
    macs: int
    """The counted MACs: of products, and of norms by fvcore's estimate."""
    formula: int
    """The MACs by the formula."""
    seconds: float
    """The fastest of several forward passes; on the CPU in processor time, which other programs do not affect."""


def layer_costs(
    lengths: Sequence[int], *, d_model: int, num_heads: int, repeats: int = 5, device: str = "cpu"
) -> list[LayerCost]:
    """Count and time each kind of layer on one sequence of each length.

    Args:
        lengths: numbers of tokens.
        d_model: channels of all layers.
        num_heads: number of attention heads.
        repeats: number of timed runs.
        device: the device for the timing; MACs are counted on the CPU.
    """
    costs = []
    for kind, layer_kind in LAYER_KINDS.items():
        layer = layer_kind.build(d_model, num_heads).eval()
        for length in lengths:
            x = torch.randn(1, length, d_model, generator=torch.Generator().manual_seed(0))
            macs = count_macs(layer.cpu(), x).total
            seconds = _fastest(layer.to(device), x.to(device), repeats)
            costs.append(LayerCost(kind, length, macs, layer_kind.macs(length, d_model), seconds))
    return costs


@torch.no_grad()
def _fastest(layer: nn.Module, x: Tensor, repeats: int) -> float:
    now = time.process_time if x.device.type == "cpu" else time.perf_counter
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        synchronize(x.device)
        start = now()
        layer(x)
        synchronize(x.device)
        times.append(now() - start)
    return min(times[1:])
