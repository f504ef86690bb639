"""Applies a layer to a few tokens at a time, so that its widest activations stay in a CPU's cache.

Compared with all tokens at once, Swin-T takes 0.91 of the time (inference, 224x224, batch 2, one thread of an AMD
EPYC); a ViT-B, whose layers are mostly matrix products, 1.0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vitkit.kernels import is_traced, plain_only

TOKENS = 512
"""Approximate number of tokens at a time, per thread."""


def in_parts(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return `layer(x)` for tokens (..., C), computed in parts on a CPU if no gradient is needed.

    Args:
        layer: a layer that processes each token independently.
    """
    if x.device.type != "cpu" or torch.is_grad_enabled() or is_traced() or plain_only():
        return layer(x)
    # Parts of equal size, as a small remainder would make the matrix products disproportionately slow.
    num_parts = round(x.shape[:-1].numel() / (TOKENS * torch.get_num_threads()))
    if num_parts < 2:
        return layer(x)
    parts = [layer(part) for part in x.flatten(0, -2).tensor_split(num_parts)]
    return torch.cat(parts).unflatten(0, x.shape[:-1])
