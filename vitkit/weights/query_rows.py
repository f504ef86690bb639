"""Takes learned queries from a checkpoint that has more or fewer of them."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from vitkit.protocols.model import Model

logger = logging.getLogger("vitkit")

NOISE = 0.1
"""Standard deviation of the noise of repeated queries, in those of the learned ones' channels."""


def match_queries(model: Model, state: dict[str, Tensor], expected: Mapping[str, Tensor], *, start: bool) -> None:
    """Take as many learned queries of a checkpoint as the model has, in place: the first ones of each group. In models
    whose first stage ranks locations, the last queries are those of the lowest scores.

    Args:
        start: the weights are a start for training, which tells queries apart: where the model has more, those of the
            checkpoint are repeated with noise. Without, more queries, or fewer of a model without a first stage, are
            left as they are, an error.
    """
    names = [name for name in model.learned_queries if name in state and name in expected]
    own = [name for name in names if name.startswith("head.")]
    sizes = {(len(state[name]), len(expected[name])) for name in own}
    if len(sizes) != 1:
        return
    ((theirs, ours),) = sizes
    ranks = any(name.startswith("head.proposals.") for name in expected)
    if theirs == ours or theirs == 0 or not (start or (ours < theirs and ranks)):
        return
    for name in names:
        groups = state[name].unflatten(0, (-1, theirs)) if len(state[name]) % theirs == 0 else None
        if groups is None or state[name].shape[1:] != expected[name].shape[1:]:
            continue
        rows = torch.arange(ours, device=groups.device) % theirs
        taken = groups[:, rows]
        if ours > theirs:
            spread = groups.std(1, keepdim=True) if theirs > 1 else torch.ones_like(groups[:, :1])
            taken[:, theirs:] += NOISE * spread * torch.randn_like(taken[:, theirs:])
        state[name] = taken.flatten(0, 1)
    first = f"the first {ours}" if ours < theirs else f"all, and repeated with noise for the {ours - theirs} others"
    logger.info("learned queries: %d in the weights, %d in the model, which gets %s", theirs, ours, first)
