"""Attention with relative positions that are a sum over the axes (Li et al. 2022, https://arxiv.org/abs/2112.01526,
section 4.1; ViTDet, https://arxiv.org/abs/2203.16527).

It is defined by a bias, and computed with one if that is small. A large bias is never materialized: without it,
MViTv2-S on clips of 16 frames takes 0.82 of the time in inference, 0.85 in a training step, and stores 0.82 of the
memory for the backward pass (CPU seconds of one thread of an Intel Xeon). For images the bias is faster: 0.94 of a
training step's time of MViTv2-T at 480x640, 0.96 in inference (on an AMD EPYC).

Shapes: B batch, L queries and S keys of maps (h, w) or clips (t, h, w), d channels per head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.kernels import plain_only
from vitkit.nn.attention import attend
from vitkit.nn.vit_positions import resize_positions_1d

Size = tuple[int, ...]

MAX_BIAS = 2**20
"""Number of scores per head and image up to which images use a bias; clips never do."""


def attend_relative(
    q: Tensor, k: Tensor, v: Tensor, tables: Sequence[Tensor], q_size: Size, k_size: Size, *, class_token: bool = False
) -> Tensor:
    """Attend with q . R_h[dy] + q . R_w[dx] (+ q . R_t[dt]) added to the scores.

    Args:
        q: (B, heads, L, d).
        k, v: (B, heads, S, d).
        tables: for each axis (2 * length - 1, d), the encoding of each distance; tables of other lengths are resized.
        q_size: size of the queries' map, along each axis.
        k_size: size of the keys' map, along each axis.
        class_token: whether queries and keys begin with a class token, which has no position.
    Returns:
        (B, heads, L, d).
    """
    scores = relative_scores(q[:, :, int(class_token) :], tables, q_size, k_size)
    if plain_only() or (len(tables) == 2 and q.shape[2] * k.shape[2] <= MAX_BIAS):
        bias = spread_scores(scores, k_size)
        return attend(q, k, v, F.pad(bias, (1, 0, 1, 0)) if class_token else bias)
    # With the positions as channels of q and k, no (heads, L, S) bias is needed. The fused kernel needs v as wide.
    one_hot = one_hot_positions(k_size, k)
    if class_token:
        scores, one_hot = F.pad(scores, (0, 0, 1, 0)), F.pad(one_hot, (0, 0, 1, 0))
    q = torch.cat((q * q.shape[-1] ** -0.5, scores), dim=-1)
    k = torch.cat((k, one_hot), dim=-1)
    return attend(q, k, F.pad(v, (0, scores.shape[-1])), scale=1.0)[..., : v.shape[-1]]


def relative_scores(q: Tensor, tables: Sequence[Tensor], q_size: Size, k_size: Size) -> Tensor:
    """Return what each query contributes to the scores of keys at each index along each axis.

    Args:
        q: (B, heads, L, d), not scaled.
        tables, q_size, k_size: see `attend_relative`.
    Returns:
        (B, heads, L, sum of `k_size`).
    """
    axes = "thw"[-len(q_size) :]
    q = q.unflatten(2, q_size)
    scores = [
        torch.einsum(f"bn{axes}c,{axis}kc->bn{axes}k", q, relative_rows(table, q_length, k_length))
        for axis, table, q_length, k_length in zip(axes, tables, q_size, k_size)
    ]
    return torch.cat(scores, dim=-1).flatten(2, 1 + len(axes))


def spread_scores(scores: Tensor, k_size: Size) -> Tensor:
    """Sum the contributions along all axes for each key: (B, heads, L, sum of `k_size`) -> (B, heads, L, S)."""
    bias = scores.new_zeros(())
    for axis, part in enumerate(scores.split(k_size, dim=-1)):
        shape = [length if i == axis else 1 for i, length in enumerate(k_size)]
        bias = bias + part.unflatten(-1, shape)
    return bias.flatten(3)


def one_hot_positions(size: Size, k: Tensor) -> Tensor:
    """Return each key's index along each axis as one-hot vectors, (B, heads, S, sum of `size`), in the keys' dtype."""
    indices = torch.meshgrid(*(torch.arange(length, device=k.device) for length in size), indexing="ij")
    one_hot = [
        torch.eye(length, dtype=k.dtype, device=k.device)[index.flatten()] for index, length in zip(indices, size)
    ]
    return torch.cat(one_hot, dim=-1).expand(*k.shape[:2], -1, -1)


def relative_rows(table: Tensor, q_length: int, k_length: int) -> Tensor:
    """Return the table's row for each query and key along one axis: (rows, d) -> (q_length, k_length, d).

    The locations of the shorter axis are spread over the longer one; distances are truncated to integers.
    """
    table = resize_positions_1d(table, 2 * max(q_length, k_length) - 1)
    # Quotients of tensors, as ONNX does not support products with numbers that depend on the size.
    q_total, k_total = (torch.full((), length, dtype=torch.float64) for length in (q_length, k_length))
    q_step, k_step = (k_total / q_total).clamp(min=1), (q_total / k_total).clamp(min=1)
    q_positions = torch.arange(q_length, device=table.device)[:, None] * q_step.float()
    k_positions = torch.arange(k_length, device=table.device) * k_step.float()
    return table[(q_positions - k_positions + ((k_total - 1) * k_step).float()).long()]
