"""Statistics of attention weights: how far heads look, and how much of each input reaches a token in all layers."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """Compute attention rollout (Abnar & Zuidema 2020, https://arxiv.org/abs/2005.00928): the product over the layers
    of each layer's attention, averaged over its heads and mixed equally with the identity for the residual path.

    Args:
        layers: (heads, N, N) for each layer, first to last; rows sum to 1.
    Returns:
        (N, N): the share of each input token (column) that reaches each output token (row).
    """
    identity = torch.eye(layers[0].shape[-1], device=layers[0].device)
    reached = identity
    for weights in layers:
        reached = torch.lerp(weights.float().mean(dim=0), identity, 0.5) @ reached
    return reached


def attention_distance(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute the mean attention distance of each head: the distance from query to key, averaged by attention weight
    and then over the queries (Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, figure 7; Raghu et al. 2021,
    https://arxiv.org/abs/2108.08810).

    Args:
        weights: (G, heads, L, S) for G groups of tokens, each attending within itself.
        queries: (G, L, 2) positions, in any unit; nan: the query is padding and is ignored.
        keys: (G, S, 2) positions; nan: attention to the key is ignored.
    Returns:
        (heads,) in the unit of the positions.
    """
    distances = torch.cdist(queries.nan_to_num(), keys.nan_to_num())[:, None]  # (G, 1, L, S)
    counted = weights * ~keys.isnan().any(-1)[:, None, None]
    of_query = (counted * distances).sum(-1) / counted.sum(-1).clamp(min=1e-12)  # (G, heads, L)
    return of_query.transpose(1, 2)[~queries.isnan().any(-1)].mean(dim=0)
