"""Activation checkpointing: blocks that recompute their activations in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vitkit.errors import ConfigError


def find_recomputable_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model that can recompute their activations in the backward pass, by name.

    These are the modules whose class has the attribute `activation_checkpointing`: False, or a property whose setter
    enables it, for a block that does so itself.
    """
    return {name: m for name, m in model.named_modules() if hasattr(type(m), "activation_checkpointing")}


def enable_activation_checkpointing(model: nn.Module, enabled: bool = True) -> int:
    """Make the blocks of a model discard their activations and recompute them in the backward pass.

    Gradients and statistics stay the same; a training step takes about a third longer.

    Returns:
        the number of blocks, see `find_recomputable_blocks`.
    Raises:
        ConfigError: the model has no such block.
    """
    blocks = find_recomputable_blocks(model).values()
    if not blocks:
        raise ConfigError(f"{type(model).__name__} has no blocks that can recompute their activations.")
    for block in blocks:
        if isinstance(type(block).activation_checkpointing, property):
            block.activation_checkpointing = enabled
        elif enabled:
            # In place of the class's `forward`, so that whoever calls the block need not know of it.
            block.forward = partial(_recompute, block)
        else:
            vars(block).pop("forward", None)
    return len(blocks)


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward pass; in training its activations are discarded, and recomputed in the backward pass."""
    forward = partial(type(block).forward, block)
    if not block.training:
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), keep_statistics(block)), **kwargs
    )


@contextmanager
def keep_statistics(block: nn.Module) -> Iterator[None]:
    """Leave the statistics of batch norms as they are inside a `with` block."""
    # The recomputation shows a batch to the norms for the second time.
    norms = [m for m in block.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    before = [(norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before):
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)
