"""The moving average of a model's weights."""

import math
from collections.abc import Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class MovingAverage(nn.Module):
    """An exponential moving average of a model's weights and buffers, in `module`; integers are the model's.

    The decay of update n, counted from 1, is decay * (1 - exp(-n / ramp_steps)), so that the average soon forgets the
    weights that it began with. The first update copies the model.

    Args:
        decay: the weight of the previous average, 0..1.
        ramp_steps: updates after which the decay is 63 % of `decay`; 0: it is constant.
        module: a copy of a sharded model, sharded alike, as torch copies no shards; None: the model is copied.
    """

    def __init__(self, model: nn.Module, *, decay: float, ramp_steps: float = 0.0, module: nn.Module | None = None):
        super().__init__()
        self.module = deepcopy(model) if module is None else module
        self.register_buffer("n_averaged", torch.tensor(0))
        self.decay = decay
        self.ramp_steps = ramp_steps

    def current_decay(self) -> float:
        """Return the decay of the next update."""
        if self.ramp_steps == 0:
            return self.decay
        return self.decay * -math.expm1(-(int(self.n_averaged) + 1) / self.ramp_steps)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Update the average, each rank its shards of it, without waiting for the device."""
        averages, values = list(_local_values(self.module)), list(_local_values(model))
        if self.n_averaged == 0:
            torch._foreach_copy_(averages, values)
        else:
            average = get_ema_multi_avg_fn(self.current_decay())
            for dtype in {x.dtype for x in averages}:
                parts = [[x for x in part if x.dtype == dtype] for part in (averages, values)]
                # A mean of counts or of indices is none.
                average(*parts, None) if dtype.is_floating_point or dtype.is_complex else torch._foreach_copy_(*parts)
        self.n_averaged += 1

    def continue_at(self, num_updates: int, decay: float) -> None:
        """Continue after that many updates, towards another decay."""
        self.n_averaged.fill_(num_updates)
        self.decay = decay


def _local_values(model: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of a model, or this rank's shards of them."""
    for value in (*model.parameters(), *model.buffers()):
        yield value.to_local() if isinstance(value, DTensor) else value
