"""Non-local blocks (Wang et al. 2018, https://arxiv.org/abs/1711.07971): each location of a map or clip sees all."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.nn.attention import attend, mask_bias, record_weights
from vitkit.registry import nearest

PAIRWISE = ("gaussian", "embedded_gaussian", "dot_product", "concatenation")
"""The paper's four pairwise functions of locations (its equations 2 to 5)."""

_CONVS = {2: nn.Conv2d, 3: nn.Conv3d}
_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOLS = {2: F.max_pool2d, 3: F.max_pool3d}


class NonLocalBlock(nn.Module):
    """x + norm(W y), where y at each location is the mean of g over all locations, weighted by a function of both
    locations.

    The block is initially the identity. State dicts of SlowFast's blocks can be loaded; its "softmax" is
    "embedded_gaussian".

    Args:
        channels: number of input and output channels.
        inner_channels: channels of queries, keys and values; None: half of `channels`.
        pairwise: one of `PAIRWISE`. The Gaussian ones are softmaxes over the locations; the others are divided by
            the number of locations. "gaussian" compares the inputs themselves.
        scaled: divide the scores of the Gaussian functions by the square root of the number of compared channels, as
            SlowFast does; the paper does not.
        pool: window sizes of the max pooling applied before keys and values, one per axis; None for no pooling.
        axes: 2 for maps, 3 for clips.
    Raises:
        ConfigError: an argument is invalid.
    """

    activation_checkpointing = False
    stride = 1

    def __init__(
        self,
        channels: int,
        inner_channels: int | None = None,
        *,
        pairwise: str = "embedded_gaussian",
        scaled: bool = True,
        pool: Sequence[int] | None = None,
        axes: int = 2,
    ):
        super().__init__()
        if pairwise not in PAIRWISE:
            raise ConfigError(f"pairwise={pairwise!r}: unknown. {nearest(pairwise, PAIRWISE)}")
        if axes not in _CONVS:
            raise ConfigError(f"axes={axes}: expected 2 (maps) or 3 (clips).")
        if pool is not None and (len(pool) != axes or min(pool) < 1):
            raise ConfigError(f"pool={pool}: expected {axes} numbers, at least 1 each.")
        if inner_channels is not None and inner_channels < 1:
            raise ConfigError(f"inner_channels={inner_channels}: expected at least 1.")
        inner_channels = inner_channels or max(channels // 2, 1)
        self.pairwise = pairwise
        self.scaled = scaled
        self.pool = tuple(pool) if pool and max(pool) > 1 else None
        self.axes = axes
        conv = _CONVS[axes]
        if pairwise != "gaussian":
            self.conv_theta = conv(channels, inner_channels, 1)
            self.conv_phi = conv(channels, inner_channels, 1)
        self.conv_g = conv(channels, inner_channels, 1)
        self.conv_out = conv(inner_channels, channels, 1)
        if pairwise == "concatenation":
            self.pair = nn.Parameter(torch.empty(2, inner_channels))
            nn.init.normal_(self.pair, std=inner_channels**-0.5)
        self.norm = _NORMS[axes](channels)
        # The block is then the identity, and can be inserted into a trained network.
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Add to each location the weighted mean over all locations.

        Args:
            x: (B, channels, [T,] H, W).
            padding: (B, 1, [T,] H, W) bool, True = padding, which is masked as a key and zero in the output; or None.
        Returns:
            a tensor of the same shape as `x`.
        """
        pooled = self._pool(x)
        q = _tokens(x if self.pairwise == "gaussian" else self.conv_theta(x))
        k = _tokens(pooled if self.pairwise == "gaussian" else self.conv_phi(pooled))
        v = _tokens(self.conv_g(pooled))
        if padding is None:
            masked = None
        else:
            # Min pooling: a pooled key is padding only if its window has nothing else.
            masked = _tokens(-self._pool(-padding.to(x.dtype)))[..., 0] > 0
        y = self._attend(q, k, v, masked)
        y = y[:, 0].transpose(1, 2).unflatten(2, x.shape[2:])
        x = x + self.norm(self.conv_out(y))
        return x if padding is None else x.masked_fill(padding, 0.0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> Tensor:
        """Return y, (B, 1, locations, inner_channels); `masked` is (B, 1, locations) bool, True = masked."""
        if "gaussian" in self.pairwise:
            bias = None if masked is None else mask_bias(masked[:, :, None], q.dtype)
            return attend(q, k, v, bias, scale=None if self.scaled else 1.0)
        visible = None if masked is None else ~masked[..., None]
        count = k.shape[2] if visible is None else visible.sum(2, keepdim=True).clamp(min=1)
        if self.pairwise == "concatenation":
            by_query, by_key = q @ self.pair[0], k @ self.pair[1]
            weights = F.relu(by_query[..., None] + by_key[..., None, :]) / count
        else:
            weights = q @ k.transpose(2, 3) / count
        if visible is not None:
            weights = weights * visible.transpose(2, 3)
        record_weights(weights)
        return weights.to(v.dtype) @ v

    def _pool(self, x: Tensor) -> Tensor:
        """Return `x` after max pooling; an axis that is shorter than its window is pooled to one location."""
        if self.pool is None:
            return x
        return _POOLS[self.axes](x, [min(window, length) for window, length in zip(self.pool, x.shape[2:])])

    def adapt_state(self, state: dict[str, Tensor], prefix: str) -> None:
        """Reshape the 1x1x1 kernels of a clip's block for a map's block, or the reverse, in place."""
        for name in ("conv_theta", "conv_phi", "conv_g", "conv_out"):
            key = f"{prefix}{name}.weight"
            if key in state and state[key].shape[2:].numel() == 1:
                state[key] = state[key].reshape(*state[key].shape[:2], *(1,) * self.axes)


def _tokens(x: Tensor) -> Tensor:
    """Flatten to the tokens of one head: (B, C, ...) -> (B, 1, locations, C)."""
    return x.flatten(2).transpose(1, 2)[:, None]
