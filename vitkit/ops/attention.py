"""Statistics of attention weights: how far heads look, and how much of each input reaches a token in all layers."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def rollout(layers: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield attention rollout (Abnar & Zuidema 2020, https://arxiv.org/abs/2005.00928) after each layer: the product
    over the layers so far of each layer's attention, averaged over its heads and mixed equally with the identity for
    the residual path.

    Args:
        layers: (heads, N, N) for each layer, first to last; rows sum to 1.
    Yields:
        (N, N): the share of each input token (column) that reaches each output token (row).
    """
    reached = None
    for weights in layers:
        mean = weights.float().mean(dim=0)
        mixed = torch.lerp(mean, torch.eye(len(mean), device=mean.device), 0.5)
        reached = mixed if reached is None else mixed @ reached
        yield reached


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
