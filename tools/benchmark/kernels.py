"""Compare operators with their published formulations: deformable attention, local relation."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.kernels.deformable_attention import deformable_attend
from vitkit.kernels.local_relation import local_relation, plain
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

Shapes = tuple[tuple[int, int], ...]
SHAPES_800X1066: Shapes = ((100, 134), (50, 67), (25, 34), (13, 17))
SHAPES_800X1333: Shapes = ((100, 167), (50, 84), (25, 42), (13, 21))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ORIGINAL, OURS, LIMIT = "original: grid_sample per level", "vitkit", "everything read and written once"


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure an operator, forward only and with its backward."""
    return {"deformable": measure_deformable, "local_relation": measure_local_relation}[part](options)


def operator_call(function: Callable[..., Tensor], inputs: list[Tensor], *, training: bool) -> Call:
    """Return a call of the function on the inputs, with its backward in training."""

    def infer() -> None:
        with torch.inference_mode():
            function(*inputs)

    if not training:
        return infer
    inputs = [x.requires_grad_() for x in inputs]
    upstream = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, upstream)


class DeformableCase(NamedTuple):
    """A case of deformable attention to run."""

    batch_size: int = 1
    num_queries: int | None = None
    """The number of queries, as in a decoder; None: every location of the maps is a query, as in an encoder."""
    training: bool = False
    shapes: Shapes = SHAPES_800X1066

    def __str__(self) -> str:
        queries = "encoder" if self.num_queries is None else f"{self.num_queries} queries"
        passes = "forward and backward" if self.training else "forward"
        return f"deformable attention, {queries}, {passes}, batch {self.batch_size}"


def measure_deformable(options: Options) -> list[Measurement]:
    """Measure both formulations; on a GPU, for 800x1333 images, ours also as a fraction of the memory bandwidth."""
    rows = []
    for case in deformable_cases(options.device):
        builders = {name: partial(attention, name, case, options) for name in (ORIGINAL, OURS)}
        if options.device == "cuda":
            builders[LIMIT] = partial(copying, case, options)
        timed = compare(str(case), builders, options)
        if options.device == "cuda":
            *timed, limit = timed
            fraction = limit.seconds / timed[-1].seconds
            timed[-1] = timed[-1]._replace(name=f"{OURS}, {fraction:.0%} of the memory's bandwidth")
        rows += timed
    return rows


def deformable_cases(device: str) -> list[DeformableCase]:
    """List the batch sizes and numbers of queries for a device, in evaluation and in training."""
    on_gpu = device == "cuda"
    shapes = SHAPES_800X1333 if on_gpu else SHAPES_800X1066
    kinds = [(batch_size, None) for batch_size in ((2, 16) if on_gpu else (1, 2))] + [(2, 300)]
    return [DeformableCase(*kind, training, shapes) for kind in kinds for training in (False, True)]


def attention(name: str, case: DeformableCase, options: Options) -> Call:
    """Return a call of the original formulation or ours, on the same data."""
    function = {ORIGINAL: grid_sample_attention, OURS: deformable_attend}[name]
    inputs = deformable_inputs(case, options)
    return operator_call(lambda values, *rest: function(values, case.shapes, *rest), inputs, training=case.training)


def deformable_inputs(case: DeformableCase, options: Options) -> list[Tensor]:
    """Return values, locations a few cells around the references, and weights, for 8 heads with 4 points per level."""
    generator = torch.Generator().manual_seed(0)
    # The centers of all locations, (S, 2) as (x, y) in 0..1.
    rows_and_columns = [[(torch.arange(length) + 0.5) / length for length in shape] for shape in case.shapes]
    references = torch.cat([torch.cartesian_prod(*centers).flip(-1) for centers in rows_and_columns])
    num_locations = len(references)
    if case.num_queries is not None:
        references = references[torch.randint(num_locations, (case.num_queries,), generator=generator)]
    shape = (case.batch_size, len(references), 8, len(case.shapes), 4)
    sizes = torch.tensor([(width, height) for height, width in case.shapes])[:, None]
    locations = references[:, None, None, None] + 3 * torch.randn(*shape, 2, generator=generator) / sizes
    weights = torch.randn(shape, generator=generator).flatten(3).softmax(-1).view(shape)
    values = torch.randn(case.batch_size, num_locations, 8, 32, generator=generator)
    dtype = DTYPES[options.precision]
    # As under autocast, locations stay in float32.
    return [values.to(options.device, dtype), locations.to(options.device), weights.to(options.device, dtype)]


def grid_sample_attention(values: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    """Sample every level with `grid_sample`; stack, weight and sum, like the original without its extension."""
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


def copying(case: DeformableCase, options: Options) -> Call:
    """Return a call that moves all bytes of inputs, outputs and gradients once, which every implementation must."""
    source = torch.zeros(least_bytes(case, options.precision) // 2, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def least_bytes(case: DeformableCase, precision: str) -> int:
    """Return the bytes of inputs, outputs and gradients, for 8 heads of 32 channels with 4 points per level."""
    size = DTYPES[precision].itemsize
    num_locations = sum(height * width for height, width in case.shapes)
    num_queries = case.num_queries or num_locations
    samples = num_queries * 8 * len(case.shapes) * 4
    # Locations are two float32 numbers at any precision.
    inputs = case.batch_size * (num_locations * 256 * size + samples * (8 + size))
    outputs = case.batch_size * num_queries * 256 * size
    # Backward reads inputs and the output's gradient, and writes the inputs' gradients.
    return inputs + outputs + case.training * (2 * inputs + outputs)


def measure_local_relation(options: Options) -> list[Measurement]:
    """Measure local relation and its definition, which stores every window in memory."""
    rows = []
    for training, passes in ((False, "forward"), (True, "forward and backward")):
        # The size is that of a classifier's second stage, with the paper's window.
        what = f"local relation, {passes}, 56x56x64, 7x7, m=8, batch 2"
        builders = {name: partial(relation, name, options, training=training) for name in FORMULATIONS}
        rows += compare(what, builders, options)
    return rows


def relation(name: str, options: Options, *, training: bool) -> Call:
    """Return a call of a formulation on random queries, keys, values and geometry priors."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 8, 56, 56), (2, 8, 56, 56), (2, 64, 56, 56), (8, 7, 7)]
    dtype = DTYPES[options.precision]
    inputs = [torch.randn(size, generator=generator).to(options.device, dtype) for size in sizes]
    return operator_call(FORMULATIONS[name], inputs, training=training)


FORMULATIONS = {
    "F.unfold, multiply, sum": partial(plain.local_relation, stride=1, dilation=1, scale=1.0, similarity="product"),
    "vitkit": local_relation,
}
