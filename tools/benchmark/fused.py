"""Measure the time that `Model.fuse` saves of a whole inference on a CPU, the distance of the rest from the arithmetic
limit, and the share of each part; weights and images are random."""

import functools
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit import build_model, load_config
from vitkit.apps.analysis.macs import count_macs
from vitkit.kernels import convolution
from vitkit.nn.deformable_attention import MultiScaleDeformableAttention
from vitkit.nn.query_selection import LocationSelection
from vitkit.nn.transformer import TransformerEncoderLayer
from vitkit.protocols.model import Model
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

MODELS = {
    "D-FINE-N": "dfine_n_coco",
    "D-FINE-S": "dfine_s_coco",
    "RT-DETR-R18": "rtdetr_r18",
    "RT-DETR-R50": "rtdetr_r50",
}
SIDE = 640
"""Height and width of the images, in pixels."""
_CHANNELS = 256
"""Channels of the convolution that has a model's number of operations."""


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure all models; `part` is the only one, "fused"."""
    rows = []
    for name, config in MODELS.items():
        builders = {row: functools.partial(build, config) for row, build in BUILDERS.items()}
        rows += compare(f"{name}, {SIDE}x{SIDE}", builders, options, memory=False)
        rows += shares(f"{name}, share of each part", config, options)
    return rows


def random_model(config: str) -> Model:
    """Return a model with random weights, without what exists in training only."""
    torch.manual_seed(0)
    spec = {name: value for name, value in load_config(config)["model"].items() if name != "training_queries"}
    return build_model(spec | dict(backbone=dict(spec["backbone"], pretrained=False))).eval()


def run(model: Model) -> Call:
    """Return a call of a model on an image."""
    image = torch.rand(1, 3, SIDE, SIDE)
    return torch.inference_mode()(lambda: model(image))


def by_pytorch(config: str) -> Call:
    """Return a call of a fused model whose convolutions are PyTorch's, with activations one after the other."""
    return patch.object(convolution, "_is_available", lambda: False)(run(random_model(config).fuse()))


def one_convolution(config: str) -> Call:
    """Return a call of a single large 3x3 convolution with as many operations as a model."""
    macs = count_macs(random_model(config).fuse(), torch.rand(1, 3, SIDE, SIDE)).total
    width = 80
    x = torch.randn(1, _CHANNELS, round(macs / (9 * _CHANNELS**2 * width)), width)
    x, weight = x.contiguous(memory_format=torch.channels_last), torch.randn(_CHANNELS, _CHANNELS, 3, 3)
    return torch.inference_mode()(lambda: F.conv2d(x, weight, padding=1))


BUILDERS: dict[str, Callable[[str], Call]] = {
    "not fused": lambda config: run(random_model(config)),
    "fused, PyTorch's convolutions": by_pytorch,
    "fused": lambda config: run(random_model(config).fuse()),
    "one convolution with as many operations": one_convolution,
}


def shares(what: str, config: str, options: Options) -> list[Measurement]:
    """Return the mean times of a fused model's parts; backbone, neck and head contain others."""
    model, times = random_model(config).fuse(), Counter()
    for name, module in model.named_modules():
        if part := part_of(name, module):
            module.forward = time_part(module.forward, part, times, options)
    call = time_part(run(model), "all", times, options)
    call()
    times.clear()
    for _ in range(options.repeats):
        call()
    whole = times["all"]
    return [
        Measurement(what, part, seconds / options.repeats, seconds / whole) for part, seconds in times.most_common()
    ]


def part_of(name: str, module: nn.Module) -> str:
    """Return the part that a module's time counts as; "" for those that are not timed."""
    room = name.partition(".")[0]
    if name in ("backbone", "neck", "head"):
        return name
    if isinstance(module, nn.Conv2d):
        side = module.kernel_size[0]
        return f"{room}: {'depthwise' if module.groups > 1 else f'{side}x{side}'} convolutions"
    if isinstance(module, nn.MaxPool2d):
        return f"{room}: pooling"
    if isinstance(module, MultiScaleDeformableAttention | LocationSelection | TransformerEncoderLayer):
        return f"{room}: {type(module).__name__}"
    return ""


def time_part(function: Callable[..., Tensor], part: str, times: Counter, options: Options) -> Callable[..., Tensor]:
    """Return a function that adds its time to that of a part."""

    def wrapper(*args: object, **named: object) -> Tensor:
        start = options.clock()
        output = function(*args, **named)
        times[part] += options.clock() - start
        return output

    return wrapper
