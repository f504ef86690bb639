"""Measure a training step of ViT-S/16 with LoRA beside one of all weights: 8 images of 224x224, AdamW."""

from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from vitkit.nn.lora import LoRA
from vitkit.registry import BACKBONES
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

MODEL, BATCH_SIZE, NUM_CLASSES = "vit_small_patch16", 8, 10
ROWS: dict[str, dict[str, Any] | None] = {
    "all weights": None,
    "rank 8 on qkv and proj": dict(layers="*attn.qkv|proj", train="head"),
    "rank 8 on queries and values of qkv": dict(layers="*attn.qkv", parts="qv", train="head"),
}


def step(lora: dict[str, Any] | None, options: Options) -> Call:
    """Return a call of a training step."""
    torch.manual_seed(0)
    model = BACKBONES.build(MODEL, num_classes=NUM_CLASSES)
    if lora is not None:
        LoRA(**lora).add_to(model)
    model = model.to(options.device).train()
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    images = torch.randn(BATCH_SIZE, 3, 224, 224, device=options.device)
    labels = torch.arange(BATCH_SIZE, device=options.device) % NUM_CLASSES

    def run() -> None:
        with options.autocast():
            loss = cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure the steps; the ratios are to that of all weights."""
    builders = {name: partial(step, lora, options) for name, lora in ROWS.items()}
    return compare(f"a training step of {MODEL}, batch {BATCH_SIZE}", builders, options)
