"""Models all of whose weights are loaded after they are built."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

_DRAWS = ("uniform", "normal", "trunc_normal", "kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal")


@contextmanager
def undrawn() -> Iterator[None]:
    """Set weights to nan where models that are built in this context draw them; a ViT-B takes 3 seconds for drawing.

    A weight that is not loaded would make all results nan.
    """
    with mock.patch.multiple(nn.init, **{f"{name}_": _fill for name in _DRAWS}):
        yield


@torch.no_grad()
def _fill(tensor: Tensor, *args: object, **options: object) -> Tensor:
    return tensor.fill_(math.nan)
