"""Measure training steps of crowds: their time and memory at 0 to 2,000 objects an image, and the share of losses and
matching; beside them whole steps of transformers' models, and of the authors' RF-DETR if `rfdetr` can be imported.

The ratio is that share of the whole step; that of the memory is to the one at `REFERENCE` objects.
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch

from vitkit.configs import deimv2, detr_r50, dfine, dino, mask2former, rf_detr, rtdetr
from vitkit.tools.benchmark.models import (
    Case,
    Contestant,
    Family,
    step,
    transformers_detector,
    transformers_mask2former,
)
from vitkit.tools.benchmark.parts import NUM_CLASSES, TimedStep
from vitkit.tools.benchmark.realtime import (
    official_rf_detr,
    transformers_dfine,
    transformers_rf_detr,
    transformers_rt_detr,
)
from vitkit.tools.benchmark.timing import Call, Measurement, Options, peak_memory, seconds_of

MODELS: dict[str, tuple[Callable[[], dict], int]] = {
    "DETR-R50": (detr_r50.config, 512),
    "DINO-R50": (dino.config, 512),
    "Mask2Former-R50": (partial(mask2former.config, data="coco", task="instance"), 512),
    "RT-DETR-R18": (partial(rtdetr.config, 18), 640),
    "D-FINE-N": (partial(dfine.config, "n"), 640),
    "DEIMv2-N": (partial(deimv2.config, "n"), 640),
    "RF-DETR-N": (partial(rf_detr.config, "n"), 384),
}
"""Name -> config, and the side of the images."""
PEERS: dict[str, dict[str, Callable[..., Contestant]]] = {
    "transformers": {
        "DETR-R50": partial(transformers_detector, "Detr"),
        "Mask2Former-R50": transformers_mask2former,
        "RT-DETR-R18": partial(transformers_rt_detr, 18),
        "D-FINE-N": partial(transformers_dfine, "n"),
        "RF-DETR-N": partial(transformers_rf_detr, partial(rf_detr.config, "n")),
    },
    "rfdetr": {"RF-DETR-N": official_rf_detr},
}
"""Package -> its models by the names of `MODELS`."""
COUNTS = (0, 20, 100, 500, 1000, 2000)
REFERENCE = 20


def make_case(name: str, count: int) -> Case:
    """Return the step of a model on two images with as many objects each."""
    side = MODELS[name][1]
    return Case(side, side, batch_size=2, training=True, targets_per_image=count)


def make_step(name: str, count: int, options: Options) -> Call:
    """Return the training step of one of vitkit's models."""
    torch.manual_seed(0)
    timed = TimedStep(MODELS[name][0], make_case(name, count), options)
    timed.watch()
    return timed


def make_peer_step(package: str, name: str, count: int, options: Options) -> Call:
    """Return that of another package's."""
    family = Family({package: PEERS[package][name]}, NUM_CLASSES, clip_grad_norm=0.1)
    return step(family, package, make_case(name, count), options)


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure each model at each number of objects; the others only with objects."""
    rows: list[Measurement] = []
    for name, (_, side) in MODELS.items():
        what = f"{name}, two images of {side} pixels"
        makers = {"": partial(make_step, name)}
        for package, models in PEERS.items():
            if name in models and find_spec(package) is not None:
                makers[f", {package}"] = partial(make_peer_step, package, name)
        for suffix, make in makers.items():
            counts = [count for count in COUNTS if count or not suffix]
            builders = {count: partial(make, count, options) for count in counts}
            peaks = dict.fromkeys(counts)
            if options.memory:
                peaks = {count: peak_memory(build, device=options.device) for count, build in builders.items()}
            for count, build in builders.items():
                seconds, share = time_steps(build(), options)
                peak, reference = peaks[count], peaks[REFERENCE]
                ratio = peak / reference if peak and reference else None
                rows.append(Measurement(what, f"{count} objects{suffix}", seconds, share, peak, ratio))
    return rows


def time_steps(call: Call, options: Options) -> tuple[float, float | None]:
    """Return the median seconds of a step after the first, and the share of losses and matching if it is vitkit's."""
    if not isinstance(call, TimedStep):
        return statistics.median([seconds_of(call, options) for _ in range(options.repeats + 1)][1:]), None
    rounds = [call() for _ in range(options.repeats + 1)][1:]
    totals = [sum(seconds.values()) for seconds in rounds]
    shares = [(seconds["loss"] + seconds["matching"]) / total for seconds, total in zip(rounds, totals)]
    return statistics.median(totals), statistics.median(shares)
