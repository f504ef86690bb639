"""Backbones beside timm's of the same architecture, as classifiers; random weights and images."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from vitkit.registry import BACKBONES
from vitkit.tools.benchmark_timing import Row, compare, peak_memory

NUM_CLASSES = 1000
PAIRS = {
    "vit_base_patch16": "vit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
    "swinv2_tiny": "swinv2_tiny_window8_256",
    "mvitv2_tiny": "mvitv2_tiny",
}
"""vitkit's variant -> timm's name."""
TRAINED_SIZE = {"swinv2_tiny": 256}
"""Where it is not 224."""


class Case(NamedTuple):
    """What is run."""

    name: str
    height: int
    width: int
    batch_size: int = 1
    training: bool = False
    device: str = "cpu"
    precision: str = "fp32"

    def __str__(self) -> str:
        what = "training step" if self.training else "inference"
        return f"{self.name}, {what}, {self.height}x{self.width}, batch {self.batch_size}"


def cases(device: str, precision: str) -> list[Case]:
    found = []
    for name in PAIRS:
        side = TRAINED_SIZE.get(name, 224)
        for training in (False, True):
            found.append(Case(name, side, side, 4, training, device, precision))
            found.append(Case(name, 480, 640, 1, training, device, precision))
    return found


def measure(
    chosen: Sequence[Case] | None = None,
    *,
    repeats: int = 9,
    device: str = "cpu",
    precision: str = "fp32",
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times both in turn, in this process; peak memory in a new process each."""
    rows = []
    for case in cases(device, precision) if chosen is None else chosen:
        calls = {whose: step(whose, case) for whose in ("timm", "vitkit")}
        timed = compare(str(case), calls, repeats=repeats, device=device, clock=clock)
        del calls  # their models
        peaks = [peak_memory(step, row.name, case, device=device) if memory else None for row in timed]
        rows += [row._replace(peak_mib=peak, peak_ratio=peak and peak / peaks[0]) for row, peak in zip(timed, peaks)]
    return rows


def step(whose: str, case: Case) -> Callable[[], Any]:
    """A call of one of the two: inference, or forward, cross entropy and backward."""
    torch.manual_seed(0)
    model = build(whose, case).to(case.device).train(case.training)
    images = torch.randn(case.batch_size, 3, case.height, case.width, device=case.device)
    labels = torch.randint(NUM_CLASSES, (case.batch_size,), device=case.device)
    autocast = torch.autocast(torch.device(case.device).type, torch.bfloat16, enabled=case.precision == "bf16")

    def infer() -> None:
        with torch.inference_mode(), autocast:
            model(images)

    def train() -> None:
        with autocast:
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train if case.training else infer


def build(whose: str, case: Case) -> nn.Module:
    """Without drop path on either side, whose random numbers would differ."""
    if whose == "vitkit":
        return BACKBONES.build(case.name, num_classes=NUM_CLASSES, drop_path=0.0)
    side = TRAINED_SIZE.get(case.name, 224)
    options: dict[str, Any] = {}
    if (case.height, case.width) != (side, side):
        # timm's MViT takes a square alone as the size that its tables are for, and any image.
        options["img_size"] = max(case.height, case.width) if "mvit" in case.name else (case.height, case.width)
    return timm.create_model(PAIRS[case.name], num_classes=NUM_CLASSES, drop_path_rate=0.0, **options)
