"""Deformable attention beside its published formulation for machines without the original's compiled extension."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.nn.deformable_attention import deformable_attend
from vitkit.tools.benchmark_timing import Row, compare, peak_memory

HEADS, CHANNELS, POINTS = 8, 32, 4
SHAPES_800X1066 = ((100, 134), (50, 67), (25, 34), (13, 17))
SHAPES_800X1333 = ((100, 167), (50, 84), (25, 42), (13, 21))
ORIGINAL, OURS, LIMIT = "original: grid_sample per level", "vitkit", "everything read and written once"


class Case(NamedTuple):
    """What is run."""

    batch_size: int = 1
    num_queries: int | None = None
    """As in a decoder; None asks from every place, as in an encoder."""
    training: bool = False
    shapes: tuple[tuple[int, int], ...] = SHAPES_800X1066
    device: str = "cpu"
    precision: str = "fp32"

    def __str__(self) -> str:
        where = "encoder" if self.num_queries is None else f"{self.num_queries} queries"
        what = "forward and backward" if self.training else "forward"
        return f"deformable attention, {where}, {what}, batch {self.batch_size}"


def measure(
    *,
    repeats: int = 9,
    device: str = "cpu",
    precision: str = "fp32",
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times both in turn, in this process; peak memory in a new process each.

    On a GPU maps are those of 800x1333 images, and it is also said what share of the memory's bandwidth is used.
    """
    rows = []
    for case in cases(device, precision):
        calls = {name: attention(name, case) for name in (ORIGINAL, OURS)}
        if device == "cuda":
            calls[LIMIT] = copying(case)
        timed = compare(str(case), calls, repeats=repeats, device=device, clock=clock)
        del calls
        if device == "cuda":
            *timed, limit = timed
            share = limit.seconds / timed[-1].seconds
            timed[-1] = timed[-1]._replace(name=f"{OURS}, {share:.0%} of the memory's bandwidth")
        peaks = [peak_memory(attention, name, case, device=device) if memory else None for name in (ORIGINAL, OURS)]
        rows += [row._replace(peak_mib=peak, peak_ratio=peak and peak / peaks[0]) for row, peak in zip(timed, peaks)]
    return rows


def cases(device: str, precision: str) -> list[Case]:
    on_gpu = device == "cuda"
    shapes = SHAPES_800X1333 if on_gpu else SHAPES_800X1066
    kinds = [(batch_size, None) for batch_size in ((2, 16) if on_gpu else (1, 2))] + [(2, 300)]
    return [
        Case(batch_size, num_queries, training, shapes, device, precision)
        for batch_size, num_queries in kinds
        for training in (False, True)
    ]


def attention(name: str, case: Case) -> Callable[[], object]:
    """A call of the original's formulation or ours, on the same data."""
    formulation = {ORIGINAL: grid_sample_attention, OURS: deformable_attend}[name]
    inputs = random_inputs(case)

    def infer() -> None:
        with torch.inference_mode():
            formulation(inputs[0], case.shapes, *inputs[1:])

    if not case.training:
        return infer
    for x in inputs:
        x.requires_grad_()
    upstream = torch.randn_like(formulation(inputs[0], case.shapes, *inputs[1:]))

    def train() -> None:
        output = formulation(inputs[0], case.shapes, *inputs[1:])
        torch.autograd.grad(output, inputs, upstream)

    return train


def random_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Values, locations some cells around the reference points, and weights."""
    generator = torch.Generator().manual_seed(0)
    places = sum(height * width for height, width in case.shapes)
    references = place_centers(case.shapes)
    if case.num_queries is not None:
        references = references[torch.randint(places, (case.num_queries,), generator=generator)]
    shape = (case.batch_size, len(references), HEADS, len(case.shapes), POINTS)
    sizes = torch.tensor([(width, height) for height, width in case.shapes])[:, None]
    locations = references[:, None, None, None] + 3 * torch.randn(*shape, 2, generator=generator) / sizes
    weights = torch.randn(shape, generator=generator).flatten(3).softmax(-1).view(shape)
    values = torch.randn(case.batch_size, places, HEADS, CHANNELS, generator=generator)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    # Under autocast, too, locations stay in float32.
    return values.to(case.device, dtype), locations.to(case.device), weights.to(case.device, dtype)


def place_centers(shapes: tuple[tuple[int, int], ...]) -> Tensor:
    """(S, 2) as (x, y) in 0..1."""
    centers = []
    for height, width in shapes:
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centers.append(torch.stack(((x + 0.5) / width, (y + 0.5) / height), dim=-1).flatten(0, 1))
    return torch.cat(centers)


def grid_sample_attention(
    values: Tensor, shapes: tuple[tuple[int, int], ...], locations: Tensor, weights: Tensor
) -> Tensor:
    """Every level's samples by `grid_sample`, stacked, weighted and summed."""
    batch_size, _, heads, channels = values.shape
    queries = locations.shape[1]
    grids = (2 * locations - 1).to(values.dtype)
    sampled = []
    for level, part in enumerate(values.split([height * width for height, width in shapes], dim=1)):
        maps = part.flatten(2).transpose(1, 2).reshape(batch_size * heads, channels, *shapes[level])
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False))
    weights = weights.transpose(1, 2).reshape(batch_size * heads, 1, queries, -1)
    output = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)
    return output.view(batch_size, heads * channels, queries).transpose(1, 2).contiguous()


def copying(case: Case) -> Callable[[], object]:
    """Moves as many bytes as inputs, output and gradients have, each once per pass: no way of computing takes less."""
    values, locations, weights = random_inputs(case)
    output_bytes = case.batch_size * locations.shape[1] * HEADS * CHANNELS * values.element_size()
    input_bytes = sum(x.numel() * x.element_size() for x in (values, locations, weights))
    # Backward reads inputs and the output's gradient, and writes the inputs' gradients.
    moved = input_bytes + output_bytes + case.training * (2 * input_bytes + output_bytes)
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=case.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
