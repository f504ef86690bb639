"""Random weights, drawn once for each state of the random numbers: a tenth of the time went into drawing the same."""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

DRAWS = ("uniform", "normal", "trunc_normal", "kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal")
"""The functions of torch.nn.init that draw, without their underscore."""
FEWEST = 2**14
"""The number of values from which a copy is faster than drawing."""
CAPACITY = 2**28
"""The number of values that are kept, 1 GiB."""


class Remembered(OrderedDict):
    """What was drawn, and the random state after it, by function, arguments and the state before; the latest last."""

    num_values = 0

    def add(self, key: tuple, values: Tensor, state_after: Tensor) -> None:
        self[key] = values, state_after
        self.num_values += values.numel()
        while self.num_values > CAPACITY:
            self.num_values -= self.popitem(last=False)[1][0].numel()


def install() -> None:
    """Replace the functions of torch.nn.init by those that remember, whose values and random states are the same."""
    remembered = Remembered()
    for name in DRAWS:
        setattr(nn.init, f"{name}_", remembering(getattr(nn.init, f"{name}_"), remembered))


def remembering(draw: Callable[..., Tensor], remembered: Remembered) -> Callable[..., Tensor]:
    """Return `draw`, which fills a tensor in place, such that it copies what it drew earlier from the same state."""

    @functools.wraps(draw)
    @torch.no_grad()
    def wrapper(tensor: Tensor, *args: object, **options: object) -> Tensor:
        if tensor.is_meta:  # has no values, and PyTorch takes longer than for real ones
            return tensor
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
        if not is_plain or tensor.numel() < FEWEST or options.get("generator") or torch._C._len_torch_dispatch_stack():
            return draw(tensor, *args, **options)
        state = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).digest()
        settings = (args, tuple(options.items()), tensor.shape, tensor.stride(), tensor.dtype)
        key = (draw.__name__, state, *settings)
        if key in remembered:
            remembered.move_to_end(key)
            values, state_after = remembered[key]
            torch.set_rng_state(state_after)
            return tensor.copy_(values)
        draw(tensor, *args, **options)
        remembered.add(key, tensor.detach().clone(), torch.get_rng_state())
        return tensor

    return wrapper
