"""The local relation layer beside its plain formulation, which lays every window out in memory."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.nn.local_relation import local_relation
from vitkit.nn.local_windows import OUTSIDE
from vitkit.tools.benchmark_timing import Row, compare, peak_memory


class Case(NamedTuple):
    """What is run; by default the second stage of a classifier, with the paper's window."""

    training: bool = False
    device: str = "cpu"
    batch_size: int = 2
    channels: int = 64
    side: int = 56
    kernel_size: int = 7
    channels_per_weight: int = 8

    def __str__(self) -> str:
        what = "forward and backward" if self.training else "forward"
        window = f"{self.kernel_size}x{self.kernel_size}, m={self.channels_per_weight}"
        return f"local relation, {what}, {self.side}x{self.side}x{self.channels}, {window}, batch {self.batch_size}"


def measure(
    *,
    repeats: int = 9,
    device: str = "cpu",
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times both in turn, in this process; peak memory in a new process each."""
    rows = []
    for case in (Case(device=device), Case(training=True, device=device)):
        calls = {name: relation(name, case) for name in FORMULATIONS}
        timed = compare(str(case), calls, repeats=repeats, device=device, clock=clock)
        peaks = [peak_memory(relation, row.name, case, device=device) if memory else None for row in timed]
        rows += [row._replace(peak_mib=peak, peak_ratio=peak and peak / peaks[0]) for row, peak in zip(timed, peaks)]
    return rows


def relation(name: str, case: Case) -> Callable[[], object]:
    """A call of the formulation on random queries, keys, values and geometry priors."""
    generator = torch.Generator().manual_seed(0)
    groups = case.channels // case.channels_per_weight
    sizes = [(case.batch_size, channels, case.side, case.side) for channels in (groups, groups, case.channels)]
    sizes.append((groups, case.kernel_size, case.kernel_size))
    inputs = [torch.randn(size, generator=generator).to(case.device) for size in sizes]
    formulation = FORMULATIONS[name]

    def infer() -> None:
        with torch.inference_mode():
            formulation(*inputs)

    if not case.training:
        return infer
    upstream = torch.ones_like(inputs[2])
    inputs = [x.requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(formulation(*inputs), inputs, upstream)


def by_unfolding(query: Tensor, key: Tensor, value: Tensor, prior: Tensor) -> Tensor:
    """The paper's formula with `F.unfold`: every window's keys and values in memory at once."""
    groups, side, _ = prior.shape
    batch_size, channels, height, width = value.shape

    def windows(x: Tensor) -> Tensor:
        return F.unfold(x, side, padding=side // 2).view(batch_size, groups, -1, side**2, height * width)

    inside = F.unfold(torch.ones_like(key[:1, :1]), side, padding=side // 2) > 0
    scores = query.view(batch_size, groups, 1, height * width) * windows(key)[:, :, 0]
    weights = (scores.where(inside, OUTSIDE) + prior.view(groups, side**2, 1)).softmax(2)
    return (windows(value) * weights[:, :, None]).sum(3).view(batch_size, channels, height, width)


FORMULATIONS = {"F.unfold, multiply, sum": by_unfolding, "vitkit": local_relation}
