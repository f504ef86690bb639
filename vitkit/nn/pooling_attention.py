"""Pooling attention (Fan et al. 2021, https://arxiv.org/abs/2104.11227; Li et al. 2022, https://arxiv.org/abs/2112.01526).

Shapes: B batch, L queries and S keys after pooling, d channels per head. `size` is that of a map, (H, W), or a clip,
(T, H, W); a class token, if there is one, comes before the other tokens and is never pooled.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError
from vitkit.kernels.windows import window_partition, window_reverse
from vitkit.nn.attention import attend
from vitkit.nn.layers import Linear
from vitkit.nn.relative_attention import attend_relative

POOLS = ("conv", "max", "avg")
_CONVS = {2: nn.Conv2d, 3: nn.Conv3d}
_POOLS = {("max", 2): nn.MaxPool2d, ("max", 3): nn.MaxPool3d, ("avg", 2): nn.AvgPool2d, ("avg", 3): nn.AvgPool3d}

Size = tuple[int, ...]


def make_pool(kind: str, channels: int, kernel: Sequence[int], stride: Sequence[int]) -> nn.Module | None:
    """Create a layer that pools each channel of a map to ceil(size / stride), or return None if it would change
    nothing.

    Raises:
        ConfigError: the kind is not in `POOLS`, or a kernel is even.
    """
    if kind not in POOLS:
        raise ConfigError(f"pool={kind!r}: expected one of {', '.join(POOLS)}.")
    kernel, stride = tuple(kernel), tuple(stride)
    if any(k < 1 or k % 2 == 0 for k in kernel):
        raise ConfigError(f"pooling kernel {kernel}: expected odd sizes.")
    if set(kernel) == set(stride) == {1}:
        return None
    padding = tuple(k // 2 for k in kernel)
    if kind != "conv":
        return _POOLS[kind, len(kernel)](kernel, stride, padding)
    return _CONVS[len(kernel)](channels, channels, kernel, stride, padding, groups=channels, bias=False)


def pool_tokens(x: Tensor, size: Size, pool: nn.Module | None, *, class_token: bool) -> tuple[Tensor, Size]:
    """Pool the tokens of a map that is stored as a sequence.

    Args:
        x: (..., [1 +] tokens, C).
        size: size of the map.
        pool: a pooling layer; None for no pooling.
        class_token: whether the sequence begins with a class token, which is not pooled.
    Returns:
        (..., [1 +] pooled tokens, C), and the pooled map's size.
    """
    if pool is None:
        return x, size
    class_tokens, tokens = (x[..., :1, :], x[..., 1:, :]) if class_token else (None, x)
    maps = tokens.reshape(-1, *size, x.shape[-1]).movedim(-1, 1)  # channels last in memory, where pooling is fastest
    maps = pool(maps).movedim(1, -1)
    size = tuple(maps.shape[1:-1])
    tokens = maps.reshape(*x.shape[:-2], -1, x.shape[-1])
    return (tokens if class_tokens is None else torch.cat((class_tokens, tokens), dim=-2)), size


class PoolingAttention(nn.Module):
    """Attention over a map whose queries, keys and values are pooled, separately for each head.

    Args:
        in_channels: number of input channels.
        out_channels: channels of queries, keys, values and output.
        num_heads: number of heads, a divisor of `out_channels`.
        pool: "conv" (one kernel per channel, shared by the heads, then a norm), "max" or "avg".
        q_kernel, q_stride: kernel and stride for the queries, along each axis.
        kv_kernel, kv_stride: kernel and stride for keys and values.
        residual: whether the pooled queries are added to the output (residual pooling).
        positions: for decomposed relative positions, the length of the longer of queries and keys along each axis; None
            for no positions. The tables `rel_pos_t` (for clips), `rel_pos_h` and `rel_pos_w` are resized for other
            maps.
        class_token: whether the sequences begin with a class token.
        window: side of the windows that attention is restricted to, in tokens of the input map, which is padded
            with zeros that are attended to; None: attend over the full map.
    Raises:
        ConfigError: the heads do not divide the channels, or the strides do not divide the window.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        num_heads: int,
        pool: str = "conv",
        q_kernel: Sequence[int] = (3, 3),
        q_stride: Sequence[int] = (1, 1),
        kv_kernel: Sequence[int] = (3, 3),
        kv_stride: Sequence[int] = (1, 1),
        residual: bool = True,
        positions: Sequence[int] | None = None,
        class_token: bool = False,
        window: int | None = None,
    ):
        super().__init__()
        if num_heads < 1 or out_channels % num_heads:
            raise ConfigError(f"num_heads={num_heads} must divide the {out_channels} channels.")
        q_stride, kv_stride = tuple(q_stride), tuple(kv_stride)
        if window is not None and (window < 1 or any(window % s for s in (*q_stride, *kv_stride))):
            raise ConfigError(
                f"window={window}: expected a multiple of the strides, {q_stride} of queries and {kv_stride} of keys."
            )
        assert window is None or not class_token, "windows have no class token"
        self.num_heads = num_heads
        self.residual = residual
        self.class_token = class_token
        self.window = window
        self.q_stride, self.kv_stride = q_stride, kv_stride
        channels = out_channels // num_heads
        self.qkv = Linear(in_channels, 3 * out_channels)
        self.proj = Linear(out_channels, out_channels)
        for name, kernel, stride in (
            ("q", q_kernel, q_stride),
            ("k", kv_kernel, kv_stride),
            ("v", kv_kernel, kv_stride),
        ):
            layer = make_pool(pool, channels, kernel, stride)
            has_norm = pool == "conv" and layer is not None
            self.add_module(f"pool_{name}", layer)
            self.add_module(f"norm_{name}", nn.LayerNorm(channels, eps=1e-6) if has_norm else None)
        self.positions = [] if positions is None else [f"rel_pos_{axis}" for axis in "thw"[-len(positions) :]]
        for name, length in zip(self.positions, positions or ()):
            table = nn.Parameter(torch.empty(2 * length - 1, channels))
            self.register_parameter(name, nn.init.trunc_normal_(table, std=0.02))

    def forward(self, x: Tensor, size: Size) -> tuple[Tensor, Size]:
        """Attend over a map, whose queries, keys and values are pooled.

        Args:
            x: (B, [1 +] tokens, in_channels).
            size: size of the map.
        Returns:
            (B, [1 +] pooled tokens, out_channels), and the pooled map's size.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, q_size = self._pool(q, size, self.pool_q, self.norm_q)
        k, k_size = self._pool(k, size, self.pool_k, self.norm_k)
        v, _ = self._pool(v, size, self.pool_v, self.norm_v)
        if self.window is None:
            output = self._attend(q, k, v, q_size, k_size)
        else:
            output = self._attend_windows(q, k, v, q_size, k_size)
        if self.residual:
            output = output + F.pad(q[:, :, 1:], (0, 0, 1, 0)) if self.class_token else output + q
        return self.proj(output.transpose(1, 2).flatten(2)), q_size

    def _pool(self, x: Tensor, size: Size, pool: nn.Module | None, norm: nn.Module | None) -> tuple[Tensor, Size]:
        x, size = pool_tokens(x, size, pool, class_token=self.class_token)
        return (x if norm is None else norm(x)), size

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, q_size: Size, k_size: Size) -> Tensor:
        if not self.positions:
            return attend(q, k, v)
        tables = [getattr(self, name) for name in self.positions]
        return attend_relative(q, k, v, tables, q_size, k_size, class_token=self.class_token)

    def _attend_windows(self, q: Tensor, k: Tensor, v: Tensor, q_size: Size, k_size: Size) -> Tensor:
        """Attend within windows; queries (B, heads, L, d), keys, values and the output are those of the full map."""
        q_window, k_window = self.window // self.q_stride[0], self.window // self.kv_stride[0]
        q, k, v = (
            window_partition(x.unflatten(2, size).permute(0, 2, 3, 1, 4).flatten(3), window)
            .unflatten(-1, (self.num_heads, -1))
            .transpose(1, 2)
            for x, size, window in ((q, q_size, q_window), (k, k_size, k_window), (v, k_size, k_window))
        )
        output = self._attend(q, k, v, (q_window, q_window), (k_window, k_window))
        output = window_reverse(output.transpose(1, 2).flatten(2), q_window, q_size)
        return output.flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
