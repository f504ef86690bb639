"""The local relation layer (Hu et al. 2019, https://arxiv.org/abs/1904.11491): a weighted mean over each window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.local_relation import SIMILARITIES, local_relation, plain
from vitkit.nn.attention import is_recording, record_weights
from vitkit.nn.layers import MLP
from vitkit.registry import nearest


class GeometryPrior(nn.Module):
    """A small network from relative positions to scores, which are added to the similarities before the softmax.

    Args:
        num_groups: number of scores per position.
        kernel_size: side of the window. The number of the network's parameters does not depend on it.
        dilation: distance between neighboring locations of the window.
    """

    positions: Tensor

    def __init__(self, num_groups: int, kernel_size: int, *, dilation: int = 1):
        super().__init__()
        self.mlp = MLP((2, num_groups, num_groups))
        steps = dilation * (torch.arange(kernel_size, dtype=torch.float32) - kernel_size // 2)
        positions = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), dim=-1)
        self.register_buffer("positions", positions, persistent=False)

    def forward(self) -> Tensor:
        """(groups, k, k)."""
        return self.mlp(self.positions).permute(2, 0, 1)


class LocalRelation(nn.Module):
    """The local relation layer, a replacement for a k x k convolution.

    Queries and keys have one channel per group; the values are the input itself, and a 1x1 convolution mixes the
    channels of the output.

    Args:
        channels: number of input and output channels.
        kernel_size: side of the window; odd.
        channels_per_weight: m, the number of neighboring channels that share a weight. The last group may have fewer.
        stride: distance between outputs on the map.
        dilation: distance between neighboring locations of the window.
        similarity: one of `SIMILARITIES`.
    Raises:
        ConfigError: a size is impossible, or the similarity is unknown.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 7,
        *,
        channels_per_weight: int = 8,
        stride: int = 1,
        dilation: int = 1,
        similarity: str = "product",
    ):
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size={kernel_size}: expected an odd number of at least 1.")
        if not 1 <= channels_per_weight <= channels:
            raise ConfigError(f"channels_per_weight={channels_per_weight}: expected 1 to the {channels} channels.")
        if min(stride, dilation) < 1:
            raise ConfigError(f"stride={stride}, dilation={dilation}: expected at least 1.")
        if similarity not in SIMILARITIES:
            raise ConfigError(f"similarity={similarity!r}: unknown. {nearest(similarity, SIMILARITIES)}")
        num_groups = -(-channels // channels_per_weight)
        self.filler = num_groups * channels_per_weight - channels
        self.stride = stride
        self.dilation = dilation
        self.similarity = similarity
        self.query = nn.Conv2d(channels, num_groups, 1, stride=stride, bias=False)
        self.key = nn.Conv2d(channels, num_groups, 1, bias=False)
        self.prior = GeometryPrior(num_groups, kernel_size, dilation=dilation)
        self.proj = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Aggregate each location's window with weights computed from query, key and geometry.

        Args:
            x: (B, channels, H, W).
        Returns:
            (B, channels, ceil(H / stride), ceil(W / stride)).
        """
        query, key, prior = self.query(x), self.key(x), self.prior()
        values = F.pad(x, (0, 0, 0, 0, 0, self.filler)) if self.filler else x
        settings = dict(stride=self.stride, dilation=self.dilation)
        if is_recording():
            weights = plain.window_weights(query, key, prior, **settings, scale=1.0, similarity=self.similarity)
            record_weights(weights.transpose(2, 3))  # (B, G, h * w, k * k)
            output = plain.window_sum(weights, values, **settings)
        else:
            output = local_relation(query, key, values, prior, **settings, similarity=self.similarity)
        return self.proj(output[:, : x.shape[1]])
