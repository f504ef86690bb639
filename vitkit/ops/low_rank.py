"""Low-rank updates of weights, as LoRA trains them (Hu et al. 2021, https://arxiv.org/abs/2106.09685)."""

from collections.abc import Mapping

import torch
from torch import Tensor

WHOLE = "whole"
"""The part of a layer that is updated by a single pair."""
WEIGHT, JOINT_WEIGHT = "weight", "in_proj_weight"
"""The parameter of a layer that is updated: of most layers, and of `MultiHeadAttention`."""
FUSED_PARTS = "qkv"
"""The parts of a layer that computes queries, keys and values: a third of its rows each, in this order."""


def low_rank_update(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return the product B A of each pair, in the rows of its part; other rows are zero.

    Args:
        pairs: part -> A (rank, in_features) and B (rows of the part, rank).
    Returns:
        (out_features, in_features).
    """
    if WHOLE in pairs:
        a, b = pairs[WHOLE]
        return b @ a
    a, b = next(iter(pairs.values()))
    zeros = a.new_zeros(len(b), a.shape[1])
    return torch.cat([pairs[part][1] @ pairs[part][0] if part in pairs else zeros for part in FUSED_PARTS])
