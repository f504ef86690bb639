"""Measure training steps of crowds: their time and memory at 0 to 2,000 objects an image, and the share of losses and
matching.

The ratio is that share of the whole step; that of the memory is to the one at `REFERENCE` objects.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch

from vitkit.configs import deimv2, detr_r50, dfine, dino, mask2former, rf_detr, rtdetr
from vitkit.tools.benchmark.models import Case
from vitkit.tools.benchmark.parts import TimedStep
from vitkit.tools.benchmark.timing import Call, Measurement, Options, peak_memory

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
COUNTS = (0, 20, 100, 500, 2000)
REFERENCE = 20


def make_step(name: str, count: int, options: Options) -> Call:
    """Return the training step of a model on two images with as many objects each."""
    torch.manual_seed(0)
    make_config, side = MODELS[name]
    case = Case(side, side, batch_size=2, training=True, targets_per_image=count)
    step = TimedStep(make_config, case, options)
    step.watch()
    return step


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure each model at each number of objects."""
    rows: list[Measurement] = []
    for name in MODELS:
        peaks = dict.fromkeys(COUNTS)
        if options.memory:
            peaks = {n: peak_memory(partial(make_step, name, n, options), device=options.device) for n in COUNTS}
        for count in COUNTS:
            step = make_step(name, count, options)
            rounds = [step() for _ in range(options.repeats + 1)][1:]
            totals = [sum(seconds.values()) for seconds in rounds]
            shares = [(seconds["loss"] + seconds["matching"]) / total for seconds, total in zip(rounds, totals)]
            peak, reference = peaks[count], peaks[REFERENCE]
            row = Measurement(
                f"{name}, two images of {MODELS[name][1]} pixels", f"{count} objects", statistics.median(totals),
                statistics.median(shares), peak, peak / reference if peak and reference else None,
            )  # fmt: skip
            rows.append(row)
    return rows
