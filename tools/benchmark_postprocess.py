"""What becomes of the outputs of models with masks on a large image: time, and memory beyond the outputs."""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from vitkit import build_model
from vitkit.configs import detr_r50_panoptic, mask2former_r50_coco_instance
from vitkit.tools.benchmark_timing import Row, compare, peak_memory

NUM_QUERIES = 100
NUM_CLASSES = {"instance": 80, "panoptic": 133, "semantic": 150}
"""By task: of COCO, COCO panoptic and ADE20K."""
NUM_THINGS = 80
CONFIGS = {"Mask2Former": mask2former_r50_coco_instance, "DETR": detr_r50_panoptic}
CASES = [("Mask2Former", task) for task in NUM_CLASSES] + [("DETR", "instance"), ("DETR", "panoptic")]
"""Families, whose post-processing differs, and their tasks. MaskFormer's is Mask2Former's."""


def measure(
    side: int = 2048,
    *,
    repeats: int = 9,
    device: str = "cpu",
    memory: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Times the post-processing of one square image for each case; peak memory in a new process each.

    Args:
        side: of the image, of what the masks cover, and of the results.
    """
    rows = []
    for family, task in CASES:
        classes = NUM_CLASSES[task]
        what = f"post-processing, {family}, {task}, {side}x{side}, {NUM_QUERIES} queries, {classes} classes"
        calls = {"vitkit": postprocessing(family, task, side, device)}
        (row,) = compare(what, calls, repeats=repeats, device=device, clock=clock)
        del calls
        peak = peak_memory(postprocessing, family, task, side, device, device=device) if memory else None
        rows.append(row._replace(peak_mib=peak))
    return rows


def postprocessing(family: str, task: str, side: int, device: str = "cpu") -> Callable[[], object]:
    """A call of a model's `postprocess`; every query is sure of some class and of its own part of the image."""
    generator = torch.Generator().manual_seed(0)
    num_classes = NUM_CLASSES[task]
    config = CONFIGS[family].config()["model"]
    things = [label < NUM_THINGS for label in range(num_classes)]
    model = build_model(config | dict(num_classes=num_classes, tasks=[task], things=things))
    labels = torch.randint(num_classes, (1, NUM_QUERIES), generator=generator)
    parts = 20 * torch.eye(NUM_QUERIES).view(1, NUM_QUERIES, 10, 10) - 10
    outputs = dict(
        pred_logits=(20.0 * F.one_hot(labels, num_classes + 1)).to(device),
        pred_boxes=torch.rand(1, NUM_QUERIES, 4, generator=generator).to(device),
        pred_masks=F.interpolate(parts, size=(side // 4, side // 4), mode="bilinear").to(device),
        input_size=(side, side),
        image_sizes=torch.tensor([[side, side]]),
    )

    def postprocess() -> object:
        with torch.inference_mode():
            return model.postprocess(outputs, [(side, side)])

    return postprocess
